"""The reward deqa around a stand-in for its model, whose code and weights are on the hub."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.table import parse_reward
from digenrl.rewards.building import build_reward

COMMIT = "0123456789" * 4
SETTINGS = {
    "name": "deqa",
    "device": "cpu",
    "batch_size": 2,
    "revision": COMMIT,
    "trust_remote_code": True,
}


class Model(torch.nn.Module):
    """The interface of DeQA-Score-Mix3: a score from 1 to 5 for each of a list of images."""

    loaded: dict[str, Any] | None = None

    @classmethod
    def from_pretrained(cls, source: str, **arguments: Any) -> Model:
        cls.loaded = {"source": source, **arguments}
        return cls()

    def score(self, images: list[Image.Image]) -> Tensor:
        assert len(images) <= 2
        return torch.tensor([float(image.getpixel((0, 0))[0]) for image in images]).half()


def test_the_score_is_a_share_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM", Model)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.36.1")
    monkeypatch.delitem(sys.modules, "digenrl.rewards.deqa", raising=False)
    pixels = torch.zeros(3, 1, 3, 8, 8)
    pixels[:, :, 0] = torch.tensor([1.0, 2.0, 5.0]).view(3, 1, 1, 1) / 255
    batch = build_reward(parse_reward(SETTINGS)).score(pixels, ["a"] * 3, [{}] * 3)
    assert batch.values == pytest.approx((0.2, 0.4, 1.0))
    assert Model.loaded is not None
    assert Model.loaded["source"] == "zhiyuanyou/DeQA-Score-Mix3" and Model.loaded["trust_remote_code"]
    assert (Model.loaded["revision"], Model.loaded["code_revision"]) == (COMMIT, COMMIT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"revision": None}, "revision: .*40 digits.*huggingface.co/zhiyuanyou/DeQA-Score-Mix3/commits"),
        ({"revision": "main"}, "revision: .*got main"),
        ({"revision": "v1.0"}, "revision: .*got v1.0"),
        ({"revision": COMMIT[:12]}, "revision: .*40 digits"),
        ({"trust_remote_code": False}, "trust_remote_code: .*executed"),
        ({"model": "/weights/deqa"}, "revision: .*directory"),
        ({"model": "/weights/deqa", "revision": None, "trust_remote_code": False}, "trust_remote_code: "),
    ],
)
def test_code_of_a_repository_is_run_only_if_it_is_allowed_and_pinned(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"'deqa': .*{message}") as caught:
        parse_reward({**SETTINGS, **change})
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"'deqa': .*revision"):
        parse_reward("deqa")
    parse_reward({"name": "deqa", "model": "/weights/deqa", "trust_remote_code": True})


def test_a_model_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(source: str, **arguments: Any) -> Model:
        raise OSError("We couldn't connect to the hub\nto load this file")

    monkeypatch.setattr("transformers.AutoModelForCausalLM", Model)
    monkeypatch.setattr(Model, "from_pretrained", unreachable)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.36.1")
    monkeypatch.delitem(sys.modules, "digenrl.rewards.deqa", raising=False)
    with pytest.raises(
        ConfigError, match=r"^zhiyuanyou/DeQA-Score-Mix3: no such directory, .* cannot be loaded: .*connect.*$"
    ):
        build_reward(parse_reward(SETTINGS))


def test_another_transformers_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "digenrl.rewards.deqa", raising=False)
    with pytest.raises(ConfigError, match=r"'deqa': .*4\.36\.1.*reward serve --env"):
        build_reward(parse_reward(SETTINGS))
