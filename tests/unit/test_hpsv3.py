"""The reward hpsv3 around a stand-in for the authors' package, which needs an environment of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.table import parse_reward
from digenrl.rewards.building import build_reward

SETTINGS = {"name": "hpsv3", "device": "cpu", "batch_size": 2}


class Inferencer:
    """The interface of hpsv3 1.0.0: two outputs per image, the mean and sigma."""

    loaded: dict[str, Any] | None = None

    def __init__(self, config_path: str | None, checkpoint_path: str | None, device: str) -> None:
        Inferencer.loaded = {"config": config_path, "checkpoint": checkpoint_path, "device": device}

    def reward(self, image_paths: list[Image.Image], prompts: list[str]) -> Tensor:
        assert len(image_paths) == len(prompts) <= SETTINGS["batch_size"]
        red = [float(image.getpixel((0, 0))[0]) for image in image_paths]
        return torch.tensor([[one, float(len(text))] for one, text in zip(red, prompts, strict=True)]).bfloat16()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("hpsv3")
    module.HPSv3RewardInferencer = Inferencer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hpsv3", module)
    monkeypatch.delitem(sys.modules, "digenrl.rewards.hpsv3", raising=False)
    Inferencer.loaded = None


def test_the_score_is_the_mean_of_each_image_for_its_prompt(package: None) -> None:
    pixels = torch.zeros(3, 1, 3, 8, 8)
    pixels[:, :, 0] = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1) / 255
    batch = build_reward(parse_reward(SETTINGS)).score(pixels, ["a", "bb", "ccc"], [{}] * 3)
    assert (batch.values, batch.parts) == ((1.0, 2.0, 3.0), {"sigma": (1.0, 2.0, 3.0)})
    assert Inferencer.loaded == {"config": None, "checkpoint": None, "device": "cpu"}


def test_a_missing_checkpoint_is_an_error_before_the_model_loads(package: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'hpsv3': .*absent\.safetensors"):
        build_reward(parse_reward({**SETTINGS, "checkpoint": str(tmp_path / "absent.safetensors")}))
    assert Inferencer.loaded is None


def test_without_the_package_the_error_says_how_to_serve_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "digenrl.rewards.hpsv3", raising=False)
    monkeypatch.setitem(sys.modules, "hpsv3", None)
    with pytest.raises(ConfigError, match=r"'hpsv3'.*reward serve hpsv3 --env"):
        build_reward(parse_reward(SETTINGS))
    assert parse_reward(SETTINGS).packages[0] == "hpsv3==1.0.0"
