"""One suite for every reward, with real tiny weights."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from judge_serving import judging
from reward_serving import TOKEN, serving
from tiny_rewards import brightness, tiny_settings
from torch import Tensor

from digenrl.config.rewards.table import REWARDS
from digenrl.rewards.building import build_reward
from digenrl.rewards.contract import Reward, RewardError
from digenrl.rewards.function import FunctionReward

PROMPTS = ['a "cat" on a mat', 'the word "dog"']
METADATA = [
    {"text": animal, "include": [{"class": animal, "count": 1, "color": "red"}], "class": breed}
    for animal, breed in (("cat", "tabby"), ("dog", "beagle"))
]
READS_PROMPTS = {"clip_score", "hpsv2", "image_reward", "pickscore"}
# Tested on their own: of faces, pairs or videos only, or run by packages that this environment does not have.
TESTED_APART = {"deqa", "face_count", "hpsv3", "preference", "videoalign"}
ONE_FRAME_AT_A_TIME = set(REWARDS) - {"function", "http", "judge"} - TESTED_APART


@pytest.fixture(scope="module", params=sorted(set(REWARDS) - TESTED_APART))
def reward(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reward]:
    """Each reward in turn; `http` and `judge` use real servers on this machine."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "judge":
        with judging() as server:
            yield build_reward(tiny_settings("judge", directory, server_url=server.url))
        return
    if request.param != "http":
        yield build_reward(tiny_settings(request.param, directory))
        return
    with serving(FunctionReward("brightness", brightness, {})) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIGENRL_REWARD_TOKEN", TOKEN)
        yield build_reward(tiny_settings("http", directory, server_url=url))


def pixels(samples: int = 2, frames: int = 1, seed: int = 0) -> Tensor:
    """Smooth colors that do not look like text."""
    coarse = torch.rand(samples * frames, 3, 4, 5, generator=torch.Generator().manual_seed(seed))
    fine = torch.nn.functional.interpolate(coarse, size=(40, 48), mode="bilinear")
    return fine.reshape(samples, frames, 3, 40, 48)


def test_there_is_one_finite_number_per_sample_in_values_and_parts(reward: Reward) -> None:
    batch = reward.score(pixels(), PROMPTS, METADATA)
    for numbers in (batch.values, *batch.parts.values()):
        assert len(numbers) == 2
        assert all(isinstance(number, float) and math.isfinite(number) for number in numbers)


def test_scoring_is_deterministic_and_does_not_change_the_pixels(reward: Reward) -> None:
    given = pixels()
    before = given.clone()
    assert reward.score(given, PROMPTS, METADATA) == reward.score(given, PROMPTS, METADATA)
    assert torch.equal(given, before)


def test_a_sample_scores_the_same_alone_and_in_a_batch(reward: Reward) -> None:
    given = pixels()
    together = reward.score(given, PROMPTS, METADATA).values
    alone = [reward.score(given[i : i + 1], PROMPTS[i : i + 1], METADATA[i : i + 1]).values[0] for i in range(2)]
    assert together == pytest.approx(alone, rel=1e-4, abs=1e-5)


def test_only_rewards_that_read_prompts_depend_on_them(reward: Reward, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["reward"]
    given = pixels(1).expand(2, -1, -1, -1, -1)
    one, other = reward.score(given, ["a cat", "zzz 123"], [METADATA[0]] * 2).values
    assert (abs(one - other) > 1e-4) == (name in READS_PROMPTS)


def test_a_video_scores_the_mean_of_its_frames(reward: Reward) -> None:
    video = pixels(samples=1, frames=2)
    frames = [reward.score(video[:, at : at + 1], PROMPTS[:1], METADATA[:1]).values[0] for at in range(2)]
    assert reward.score(video, PROMPTS[:1], METADATA[:1]).values[0] == pytest.approx(
        sum(frames) / 2, rel=1e-4, abs=1e-5
    )


def test_pixels_that_are_not_numbers_are_an_error_that_names_the_sample(reward: Reward) -> None:
    for bad in (math.nan, math.inf, 1.5):
        given = pixels()
        given[1, 0, 2, 3, 4] = bad
        with pytest.raises(RewardError, match=r"sample 1: .*pixels") as caught:
            reward.score(given, PROMPTS, METADATA)
        assert caught.value.samples == (1,)
        assert caught.value.reward == reward.label


def test_a_wrong_call_is_a_value_error(reward: Reward) -> None:
    with pytest.raises(ValueError, match="2 samples, 1 prompts and 2 metadata"):
        reward.score(pixels(), PROMPTS[:1], METADATA)
    with pytest.raises(ValueError, match=r"shape .*\(2, 3, 40, 48\)"):
        reward.score(pixels()[:, 0], PROMPTS, METADATA)
    with pytest.raises(ValueError, match=r"torch\.uint8"):
        reward.score((pixels() * 255).to(torch.uint8), PROMPTS, METADATA)


def test_rewards_of_images_take_every_kth_frame(tmp_path: Path) -> None:
    for name in sorted(ONE_FRAME_AT_A_TIME - {"geneval", "ocr"}):
        settings = tiny_settings(name, tmp_path / name).model_copy(update={"frame_stride": 2})
        reward = build_reward(settings)
        video = pixels(samples=1, frames=3)
        changed = video.clone()
        changed[:, 1] = 0  # frames 0 and 2 count
        assert reward.score(video, PROMPTS[:1], METADATA[:1]) == reward.score(changed, PROMPTS[:1], METADATA[:1])
        changed[:, 2] = 0
        assert reward.score(video, PROMPTS[:1], METADATA[:1]) != reward.score(changed, PROMPTS[:1], METADATA[:1])


def test_an_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(RewardError("ocr", "no text", (3,))))
    assert (str(error), error.samples) == ("reward 'ocr', sample 3: no text", (3,))
