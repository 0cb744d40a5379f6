"""ResNet-101 and GPT-2 train in stages as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chain_models import MODELS, batches, chain_of, loss_of, named_gradients, train_stages
from rank_processes import on_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from digenrl.training.ranks.rank_group import RankGroup

TIED = "transformer.wte.weight"
CHAIN_LENGTHS = {"resnet": 35, "gpt2": 7}


def whole(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and gradients of the model's own forward."""
    model: Any = MODELS[name]()
    assert len(chain_of(model)) == CHAIN_LENGTHS[name]
    losses = []
    for inputs, targets in zip(*batches(name, 4), strict=True):
        loss = loss_of(model(inputs).logits, targets)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, named_gradients(model, [model])


@pytest.fixture(scope="module")
def one_process() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    return {name: whole(name) for name in MODELS}


@pytest.mark.parametrize(
    "cuts", [{"resnet": (0, 12, 35), "gpt2": (0, 3, 7)}, {"resnet": (0, 1, 30, 35), "gpt2": (0, 2, 3, 7)}]
)
def test_resnet_101_and_gpt_2_have_the_gradients_of_one_process(
    cuts: dict[str, Sequence[int]], one_process: dict[str, tuple[list[float], dict[str, Tensor]]], tmp_path: Path
) -> None:
    stages = on_ranks(len(cuts["gpt2"]) - 1, tmp_path, train_stages, cuts)
    for name, (losses, expected) in one_process.items():
        assert [float(loss) for loss in stages[-1][name]["losses"]] == losses
        found = [stage[name]["gradients"] for stage in stages]
        assert set().union(*found) == expected.keys()
        for key, value in expected.items():
            for each in (stage[key] for stage in found if key in stage):
                if key == TIED:
                    torch.testing.assert_close(each, value, rtol=1e-5, atol=1e-7)
                else:
                    assert torch.equal(each, value), key
    assert [TIED in stage["gpt2"]["gradients"] for stage in stages] == [True, *[False] * (len(stages) - 2), True]


def gpipe(ranks: RankGroup, bounds: Sequence[int]) -> dict[str, Tensor]:
    """The gradients of a stage of GPT-2 by torch's own pipeline; its tied weights are not summed."""
    model = MODELS["gpt2"]()
    index = ranks.rank.index
    modules = chain_of(model)[bounds[index] : bounds[index + 1]]
    stage = PipelineStage(nn.Sequential(*modules), index, ranks.rank.count, torch.device("cpu"))
    inputs, targets = (torch.cat(each) for each in batches("gpt2", 4))
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_of, scale_grads=False)
    if index == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets)
    return named_gradients(model, modules)


def test_torchs_pipeline_has_the_same_gradients(tmp_path: Path) -> None:
    bounds = (0, 3, 7)
    ours = on_ranks(2, tmp_path, train_stages, {"gpt2": bounds})
    theirs = on_ranks(2, tmp_path, gpipe, bounds)
    for stage, expected in zip(ours, theirs, strict=True):
        assert stage["gpt2"]["gradients"].keys() == expected.keys()
        for key, value in expected.items():
            assert key == TIED or torch.equal(stage["gpt2"]["gradients"][key], value), key
