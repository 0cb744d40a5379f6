"""Models of all families in stages: the velocity and the gradients of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from staged_models import (
    CHAINS,
    Inputs,
    deep_model,
    gradients_of,
    make_inputs,
    staged_pass,
    train_adapters,
    velocity,
    whole_pass,
)

from digenrl.config.reading import ConfigError
from digenrl.models.blocks import block_places, repeated_blocks
from digenrl.models.contract import DiffusionModel
from digenrl.models.loading.sources import ModelSource
from digenrl.models.loading.staged_loading import load_stage
from digenrl.models.loading.stored_weights import StoredWeights
from digenrl.models.parallel.staged_blocks import chain_length, check_chain, keep_blocks
from digenrl.models.registry import FAMILIES
from digenrl.testing.tiny_models import TINY_MODELS, make_tiny_pipeline

SHARED_ERROR = 1e-6  # stages add up the parts of a gradient in another order
# Their gradients are slices of longer sequences, which are summed differently.
BLOCK_ERROR = {"hunyuan_video": 1e-6, "hunyuan_video_1_5": 1e-6}


@pytest.mark.parametrize("family", CHAINS)
def test_stages_give_the_velocity_and_gradients_of_the_whole_model(family: str) -> None:
    model = deep_model(family)
    inputs = make_inputs(model, family)
    model.drop_text_encoders()
    count = chain_length(model.transformer, model.blocks_before_chain)
    assert count >= 3
    two, three = (0, 1, count), (0, 1, count - 1, count)
    assert_same(model, family, inputs, two, checkpointed=False)
    if family == "flux":
        assert_same(model, family, inputs, three, checkpointed=True)
    train_adapters(model)
    assert_same(model, family, inputs, three, checkpointed=True)
    if family == "flux":
        assert_same(model, family, inputs, two, checkpointed=False)


def assert_same(
    model: DiffusionModel, family: str, inputs: Inputs, bounds: tuple[int, ...], checkpointed: bool
) -> None:
    expected = whole_pass(model, family, inputs, checkpointed)
    whole = gradients_of(model)
    value, stages = staged_pass(model, family, inputs, bounds, checkpointed)
    assert torch.equal(value, expected)
    assert set().union(*stages) == whole.keys()
    in_blocks = {name for name, _, _ in block_places(model.transformer)}
    square_error = square = 0.0
    for name, gradient in whole.items():
        parts = [stage[name] for stage in stages if name in stage]
        error = torch.stack(parts).sum(dim=0) - gradient
        if name.split(".")[0] in in_blocks:
            assert len(parts) == 1, name
            assert error.abs().max() <= BLOCK_ERROR.get(family, 0.0) * gradient.abs().max(), name
        else:
            square_error += float(error.square().sum())
            square += float(gradient.square().sum())
    assert square_error**0.5 <= SHARED_ERROR * square**0.5


def test_every_family_with_a_transformer_is_covered() -> None:
    assert {"sd3", "flux", "qwen_image", "wan", "hunyuan_video", "flux2_klein", "z_image"} <= set(CHAINS)


def test_a_stage_holds_its_own_blocks_under_their_names() -> None:
    model = deep_model("flux")
    names = set(dict(model.transformer.named_parameters()))
    keep_blocks(model, 2, 4)
    assert len(repeated_blocks(model.transformer)) == 2
    kept = dict(model.transformer.named_parameters())
    assert kept.keys() < names
    assert {tuple(name.split(".")[:2]) for name in kept if "transformer_blocks" in name} == {
        ("transformer_blocks", "2"),
        ("single_transformer_blocks", "0"),
    }


def test_a_stage_reads_only_its_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, folder = FAMILIES["flux"], tmp_path / "flux"
    make_tiny_pipeline("flux", folder)
    whole = family.load(folder, torch.bfloat16, text_encoders=False)
    expected = dict(whole.transformer.state_dict())
    names: list[str] = []
    read = StoredWeights.read

    def noting(self: StoredWeights, name: str, *rest: Any) -> torch.Tensor:
        names.append(name)
        return read(self, name, *rest)

    monkeypatch.setattr(StoredWeights, "read", noting)
    model = load_stage(family, ModelSource.of(folder), range(1, 3), torch.bfloat16)
    found = model.transformer.state_dict()
    assert model.own_blocks is not None and model.own_blocks.is_last
    assert found.keys() < expected.keys()
    assert not any(name.startswith("transformer_blocks.") for name in names)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def test_states_of_other_forwards_are_refused() -> None:
    model = deep_model("wan")
    inputs = make_inputs(model, "wan")
    keep_blocks(model, 1, 3)
    assert model.own_blocks is not None
    with pytest.raises(RuntimeError, match="same forwards"):
        model.own_blocks.run((torch.zeros(1, 2, 3),), lambda: velocity(model, "wan", inputs))


@pytest.mark.parametrize(("first", "end"), [(0, 0), (2, 1), (0, 4), (-1, 2)])
def test_blocks_outside_of_the_chain_are_refused(first: int, end: int) -> None:
    with pytest.raises(ValueError, match="chain of 3"):
        keep_blocks(deep_model("wan"), first, end)


def test_a_unet_is_refused() -> None:
    with pytest.raises(ConfigError, match="UNet"):
        check_chain(FAMILIES["sd15"].model_class(TINY_MODELS["sd15"].build()))
