"""A user's reward in a process of its own: same scores, and limits on time and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.table import FunctionSettings
from digenrl.rewards.building import build_reward
from digenrl.rewards.contract import Reward, RewardBatch, RewardError
from digenrl.rewards.serving.isolated import IsolatedReward, without_secrets

PIXELS = torch.rand(3, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def moody(pixels: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> RewardBatch:
    """Does what the first prompt says."""
    print("printed, which must not disturb the replies")
    word = prompts[0]
    if word == "hang":
        time.sleep(600)
    if word == "die":
        os._exit(3)
    if word == "eat":
        torch.ones(10**9)
    if word == "eat bytes":
        bytearray(4 * 10**9)
    if word == "raise":
        raise ValueError("a bad day")
    if word == "read":
        assert subprocess.run(["cat"], stdout=subprocess.PIPE, check=True).stdout == b""
    if word == "compare":
        return RewardBatch(tuple(float(sum(image.sum() for image in one["source_images"])) for one in metadata))
    secret = float("DIGENRL_REWARD_TOKEN" in os.environ)
    values = pixels.flatten(1).mean(dim=1)
    return RewardBatch(values, {"secret": torch.tensor([secret] * len(values))})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reward]:
    before = dict(os.environ)
    os.environ["DIGENRL_REWARD_TOKEN"] = "secret"
    sys.path.insert(0, str(Path(__file__).parent))
    settings = FunctionSettings(
        target="test_isolated_rewards:moody", isolated=True, timeout_s=10.0, memory_gb=3.0, label="moody"
    )
    built = build_reward(settings)
    assert isinstance(built, IsolatedReward)
    yield built
    built.close()
    os.environ.clear()
    os.environ.update(before)


def score(reward: Reward, word: str = "a cat") -> RewardBatch:
    return reward.score(PIXELS, [word] * 3, [{}] * 3)


def test_it_gives_the_scores_of_the_function_and_does_not_see_secrets(reward: Reward) -> None:
    batch = score(reward)
    assert batch.values == tuple(PIXELS.flatten(1).mean(dim=1).tolist())
    assert batch.parts == {"secret": (0.0, 0.0, 0.0)}
    kept = {"HOME": "/", "CUDA_VISIBLE_DEVICES": "0", "TOKENIZERS_PARALLELISM": "false"}
    secret = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "API_KEY", "OPENAI_APIKEY", "PGPASSWORD", "GHTOKEN", "SSH_KEYS")
    assert without_secrets(kept | dict.fromkeys(secret, "x")) == kept


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("raise", "ValueError: a bad day"),
        ("eat", "memory|allocate"),
        ("eat bytes", "raise memory_gb"),
        ("die", "code 3"),
    ],
)
def test_whatever_it_does_is_a_missing_score_and_the_next_batch_is_scored(
    reward: Reward, word: str, reason: str
) -> None:
    with pytest.raises(RewardError, match=reason):
        score(reward, word)
    assert len(score(reward).values) == 3


def test_programs_that_it_runs_do_not_read_its_requests(reward: Reward) -> None:
    assert len(score(reward, "read").values) == 3


class Unloadable(Reward):
    """Fails in a way of its own when it is built."""

    def __init__(self, label: str) -> None:
        raise OSError("the weights are cut off")

    def _score(self, pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> RewardBatch:
        raise AssertionError


def test_the_error_of_a_reward_that_cannot_be_built_has_its_reason() -> None:
    with pytest.raises(ConfigError, match="OSError: the weights are cut off"):
        build_reward(FunctionSettings(target="test_isolated_rewards:Unloadable", isolated=True))


def test_it_sees_the_source_images_of_every_sample(reward: Reward) -> None:
    sources = [(torch.rand(3, 2, 5),), (torch.rand(3, 4, 4), torch.rand(3, 1, 1)), (torch.ones(3, 2, 2),)]
    batch = reward.score(PIXELS, ["compare"] * 3, [{"source_images": each} for each in sources])
    assert batch.values == tuple(float(sum(image.sum() for image in each)) for each in sources)


def test_a_batch_that_takes_too_long_is_ended(reward: Reward) -> None:
    """The last test of this process, which is not started again."""
    with pytest.raises(RewardError, match=r"longer than 10 s"):
        score(reward, "hang")
