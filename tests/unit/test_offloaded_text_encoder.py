"""Text encoders that are on a device only while they encode."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from digenrl.models.loading.parked import OffloadedTextEncoder, ParkedWeights
from digenrl.models.registry import find_family
from digenrl.testing.tiny_models import make_tiny_pipeline

PROMPTS = ["a red fox", "two dogs on a hill at night"]


@pytest.mark.parametrize("family", ["sd3", "qwen_image"])
def test_an_offloaded_encoder_encodes_the_same_and_its_weights_return_to_the_host(
    family: str, tmp_path: Path
) -> None:
    make_tiny_pipeline(family, tmp_path / "model")
    model = find_family(family).load_text_encoders(tmp_path / "model")
    expected = model.encode(PROMPTS)
    offloaded = OffloadedTextEncoder(model, "cpu")
    on_host = [weight.data_ptr() for weight in model.pipeline.text_encoder.parameters()]
    for _ in range(2):
        got = offloaded.encode(PROMPTS)
        for name, value in expected.positive.items():
            assert value is not None and torch.equal(value, got.positive[name])
        assert [weight.data_ptr() for weight in model.pipeline.text_encoder.parameters()] == on_host
    offloaded.drop_text_encoders()
    with pytest.raises(RuntimeError, match="not loaded"):
        offloaded.encode(PROMPTS)


def test_weights_return_to_the_host_even_if_encoding_fails(tmp_path: Path) -> None:
    make_tiny_pipeline("sd3", tmp_path / "model")
    model = find_family("sd3").load_text_encoders(tmp_path / "model")
    offloaded = OffloadedTextEncoder(model, "cpu")
    on_host = [weight.data_ptr() for weight in model.pipeline.text_encoder.parameters()]
    with pytest.raises(ValueError, match="negative prompt"):
        offloaded.encode(PROMPTS, ["only one"])
    assert [weight.data_ptr() for weight in model.pipeline.text_encoder.parameters()] == on_host


def test_weights_are_pinned_one_by_one_and_not_all_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    originals = [weakref.ref(weight.data.untyped_storage()) for weight in layers.parameters()]
    alive: list[int] = []

    def pinned(value: torch.Tensor) -> torch.Tensor:
        alive.append(sum(original() is not None for original in originals))
        return value.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    ParkedWeights([layers], "cuda", pinned=True)
    assert alive == [6, 5, 4, 3, 2, 1]
