"""Full fine-tuning in stages: each rank trains the weights of its own blocks, and all of them what they share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_processes import on_ranks
from staged_models import deep_model
from staged_training import FullTraining, StagedCase, resume_fully, train_fully

from digenrl.models.parallel.staged_blocks import outside_blocks

# The last policy, the reference and the moving average are kept beside the trained weights.
CASE = StagedCase(
    "diffusion_nft",
    settings={"ema": {"decay": 0.5, "every_updates": 1}, "gradient_norm": 10.0},
    batches=3,
    full=True,
)
UNEVEN, OTHER = (0, 1, 3), (0, 1, 2, 3)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> FullTraining:
    return train_fully(None, CASE, (), tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def stages(folder: Path) -> list[FullTraining]:
    return on_ranks(2, folder, train_fully, CASE, UNEVEN, folder / "checkpoints")


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_block_gradients_are_those_of_one_process_bit_for_bit_and_shared_ones_up_to_rounding(
    one: FullTraining, stages: list[FullTraining]
) -> None:
    shared = outside_blocks(deep_model("sd3"))
    blocks = [each.gradient.keys() - shared for each in stages]
    assert not blocks[0] & blocks[1]
    assert blocks[0] | blocks[1] == one.gradient.keys() - shared
    for stage in stages:
        for name, value in stage.gradient.items():
            if name in shared:
                torch.testing.assert_close(
                    value, one.gradient[name], rtol=1e-6, atol=1e-6 * float(value.abs().max())
                )
            else:
                assert torch.equal(value, one.gradient[name]), name


def test_all_weights_and_metrics_are_those_of_one_process(one: FullTraining, stages: list[FullTraining]) -> None:
    assert_close(stages[0].published, one.published)
    assert_close(stages[0].average, one.average)
    assert not stages[1].published, "the first stage publishes"
    for ours, expected in zip(stages[0].metrics, one.metrics, strict=True):
        assert ours["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-6)
        assert ours["measures"] == pytest.approx(expected["measures"], rel=1e-4)
    assert stages[0].metrics == stages[1].metrics


def test_a_rank_has_optimizer_state_of_its_own_weights_alone(
    one: FullTraining, stages: list[FullTraining]
) -> None:
    shared = outside_blocks(deep_model("sd3"))
    assert stages[0].optimizer_names & stages[1].optimizer_names <= shared
    assert stages[0].optimizer_names | stages[1].optimizer_names == one.optimizer_names


def test_other_stages_and_one_process_go_on_from_a_checkpoint(
    stages: list[FullTraining], folder: Path, tmp_path: Path
) -> None:
    checkpoint = folder / "checkpoints" / "step_000002"
    others = on_ranks(3, tmp_path, resume_fully, CASE, OTHER, checkpoint)
    assert_close(others[0].published, stages[0].published)
    assert_close(resume_fully(None, CASE, (), checkpoint).published, stages[0].published)
