"""Weighted sums, rewards outside the package, and failures, which are never replaced by a number."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.table import FunctionSettings, parse_reward, parse_rewards
from digenrl.rewards.building import WeightedReward, build_reward, build_rewards
from digenrl.rewards.contract import FrameReward, Reward, RewardBatch, RewardError
from digenrl.rewards.function import FunctionReward, import_target

PIXELS = torch.full((3, 1, 3, 8, 8), 0.5)
PROMPTS = ["a", "b", "c"]
METADATA: list[dict[str, Any]] = [{}, {}, {}]


def returning(answer: object, label: str = "mine") -> FunctionReward:
    return FunctionReward(label, lambda pixels, prompts, metadata: answer, {})


def test_raw_scores_are_weighted_and_summed_and_each_is_a_part() -> None:
    first = returning(RewardBatch((1.0, 2.0, 3.0), {"detail": (7.0, 8.0, 9.0)}), "first")
    both = WeightedReward([(first, 0.5), (returning([10, 20, 30], "second"), -2.0)])
    batch = both.score(PIXELS, PROMPTS, METADATA)
    assert batch.values == (-19.5, -39.0, -58.5)
    assert batch.parts == {
        "first": (1.0, 2.0, 3.0),
        "first/detail": (7.0, 8.0, 9.0),
        "second": (10.0, 20.0, 30.0),
    }


def test_several_rewards_are_built_with_their_weights() -> None:
    settings = parse_rewards([{"name": "jpeg_compressibility", "weight": 2}, {"name": "jpeg_incompressibility"}])
    batch = build_rewards(settings).score(PIXELS, PROMPTS, METADATA)
    small, large = batch.parts["jpeg_compressibility"], batch.parts["jpeg_incompressibility"]
    assert [-one for one in small] == list(large)
    assert batch.values == tuple(2 * one + other for one, other in zip(small, large, strict=True))
    assert batch.parts["jpeg_compressibility/kilobytes"] == large


def test_a_reward_that_is_loaded_already_is_used_again_with_another_weight() -> None:
    first = parse_rewards(["jpeg_compressibility", {"name": "jpeg_incompressibility", "weight": 2}])
    loaded = [(settings, build_reward(settings)) for settings in first]
    second = parse_rewards([{"name": "jpeg_incompressibility", "weight": 5}, QUALITY])
    (again, weight), (other, _) = build_rewards(second, loaded).rewards
    assert again is loaded[1][1] and weight == 5
    assert other is not loaded[0][1], "its settings differ"


QUALITY = {"name": "jpeg_compressibility", "quality": 50}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_or_a_part_that_is_not_finite_is_an_error_that_names_sample_and_reward(bad: float) -> None:
    for answer in (
        [0.0, bad, 1.0],
        torch.tensor([0.0, bad, 1.0]),
        RewardBatch((0.0,) * 3, {"p": (0.0, bad, 0.0)}),
    ):
        with pytest.raises(RewardError, match=r"'mine'.*finite") as error:
            returning(answer).score(PIXELS, PROMPTS, METADATA)
        assert error.value.samples == (1,)
        with pytest.raises(RewardError, match="'mine', sample 1"):
            WeightedReward([(returning([1, 2, 3], "good"), 1.0), (returning(answer), 0.0)]).score(
                PIXELS, PROMPTS, METADATA
            )


def test_a_reward_that_changes_the_pixels_of_the_next_one_is_an_error() -> None:
    def darkens(pixels: Tensor, prompts: object, metadata: object) -> Tensor:
        return pixels.mul_(0.5).flatten(1).mean(dim=1)

    changing, other = FunctionReward("darkens", darkens, {}), returning([1, 2, 3])
    with pytest.raises(RewardError, match=r"'darkens'.*clone"):
        WeightedReward([(changing, 1.0), (other, 1.0)]).score(PIXELS.clone(), PROMPTS, METADATA)
    assert WeightedReward([(other, 1.0), (changing, 1.0)]).score(PIXELS.clone(), PROMPTS, METADATA)


def test_a_weighted_sum_that_overflows_is_an_error() -> None:
    with pytest.raises(RewardError, match="sample 2"):
        WeightedReward([(returning([0.0, 0.0, 1e300]), 1e300)]).score(PIXELS, PROMPTS, METADATA)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0, 2.0], "2 scores for 3 samples"),
        (torch.zeros(3, 1), r"sample 0: .*\[0.0\]"),
        ([1.0, None, 2.0], "sample 1: .*None"),
        (0.5, "list of numbers.*0.5"),
        (None, "list of numbers.*None"),
        (RewardBatch((1.0, None, 2.0)), "sample 1: the score is None"),  # type: ignore[arg-type]
        (RewardBatch((1.0,) * 3, {"p": (0.0, 0.0, "x")}), "sample 2: part 'p' is 'x'"),  # type: ignore[dict-item]
    ],
)
def test_a_result_of_the_wrong_type_is_an_error(answer: object, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        returning(answer).score(PIXELS, PROMPTS, METADATA)


def test_a_class_that_returns_no_reward_batch_is_an_error() -> None:
    class Careless(Reward):
        def _score(self, pixels: Tensor, prompts: object, metadata: object) -> Any:
            return [1.0, 2.0, 3.0]

    with pytest.raises(RewardError, match=r"'careless'.*RewardBatch.*\[1.0, 2.0, 3.0\]"):
        Careless("careless").score(PIXELS, PROMPTS, METADATA)


def test_an_array_of_numbers_is_accepted() -> None:
    assert returning(numpy.float32([0.5, 1, 2])).score(PIXELS, PROMPTS, METADATA).values == (0.5, 1.0, 2.0)


def test_an_exception_of_a_function_becomes_a_reward_error_with_its_cause() -> None:
    def broken(pixels: Tensor, prompts: object, metadata: object) -> list[float]:
        raise ZeroDivisionError("my mistake")

    with pytest.raises(RewardError, match="'broken', all samples: ZeroDivisionError") as caught:
        FunctionReward("broken", broken, {}).score(PIXELS, PROMPTS, METADATA)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_users_function_gets_pixels_prompts_metadata_and_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_own.py").write_text(
        "def longer(pixels, prompts, metadata, bonus):\n"
        "    assert pixels.shape == (3, 1, 3, 8, 8)\n"
        "    return [len(p) + m.get('extra', 0) + bonus for p, m in zip(prompts, metadata)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = build_reward(
        parse_reward({"name": "function", "target": "users_own:longer", "arguments": {"bonus": 0.5}})
    )
    assert reward.label == "longer"
    assert reward.score(PIXELS, ["a", "bb", "ccc"], [{}, {"extra": 10}, {}]).values == (1.5, 12.5, 3.5)
    with pytest.raises(
        ConfigError, match=r"users_own:longer.*'bonuss'.*takes \(pixels, prompts, metadata, bonus\)"
    ):
        build_reward(parse_reward({"name": "users_own:longer", "arguments": {"bonus": 1, "bonuss": 2}}))
    with pytest.raises(ConfigError, match=r"'longr'.*'longer'"):
        build_reward(parse_reward("users_own:longr"))
    with pytest.raises(ConfigError, match=r"'nowhere_to_be_found'.*python_path"):
        build_reward(parse_reward("nowhere_to_be_found.sub:f"))


def test_a_users_function_of_groups_gets_the_one_prompt_of_all_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_ranks.py").write_text(
        "def brightness_rank(pixels, prompt, metadata, best):\n"
        "    assert (prompt, metadata) == ('a', {'x': 1})\n"
        "    return best * pixels.flatten(1).mean(dim=1).argsort().argsort()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = build_reward(
        parse_reward({"name": "users_ranks:brightness_rank", "scores": "groups", "arguments": {"best": 2}})
    )
    pixels = torch.tensor([0.4, 0.9, 0.1]).reshape(3, 1, 1, 1, 1).expand(3, 1, 3, 8, 8)
    assert reward.score(pixels, ["a"] * 3, [{"x": 1}] * 3).values == (2.0, 4.0, 0.0)
    with pytest.raises(RewardError, match="one prompt, got 3"):
        reward.score(pixels, PROMPTS, METADATA)


def test_a_users_class_is_built_with_its_label_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_class.py").write_text(
        "from digenrl.rewards.contract import FrameReward, RewardBatch\n"
        "class Brightness(FrameReward):\n"
        "    def __init__(self, label, gain=1.0):\n"
        "        super().__init__(label)\n"
        "        self.gain = gain\n"
        "    def score_frames(self, frames, prompts, metadata):\n"
        "        return RewardBatch(tuple(self.gain * float(f.float().mean()) for f in frames))\n"
        "class Other:\n"
        "    pass\n"
        "class Unscored(FrameReward):\n"
        "    def score_frame(self, frames, prompts, metadata):\n"
        "        pass\n"
        "class Unlabeled(Brightness):\n"
        "    def __init__(self, label):\n"
        "        pass\n"
        "class Listed(FrameReward):\n"
        "    def score_frames(self, frames, prompts, metadata):\n"
        "        return [0.0] * len(frames)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = build_reward(parse_reward({"name": "own_class:Brightness", "arguments": {"gain": 2.0}}))
    assert reward.label == "Brightness"
    assert reward.score(PIXELS, PROMPTS, METADATA).values == (256.0,) * 3
    with pytest.raises(ConfigError, match=r"'own_class:Brightness'.*arguments"):
        build_reward(parse_reward({"name": "own_class:Brightness", "arguments": {"gian": 2.0}}))
    with pytest.raises(ConfigError, match=r"'own_class:Other'.*Reward"):
        build_reward(parse_reward("own_class:Other"))
    unscored = parse_reward("own_class:Unscored")
    assert isinstance(unscored, FunctionSettings)
    with pytest.raises(ConfigError, match=r"'own_class:Unscored'.*score_frames"):
        import_target(unscored)
    with pytest.raises(ConfigError, match=r"'own_class:Unlabeled'.*super"):
        build_reward(parse_reward("own_class:Unlabeled"))
    with pytest.raises(RewardError, match=r"RewardBatch.*, got \[0"):
        build_reward(parse_reward("own_class:Listed")).score(PIXELS, PROMPTS, METADATA)


def test_the_error_for_a_missing_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="'a_package_that_is_not_there'"):
        build_reward(parse_reward("needs_more:f"))


class FailsOnRow(FrameReward):
    """Raises, or returns NaN, for one of the images."""

    def __init__(self, row: int, raises: bool) -> None:
        super().__init__("fails")
        self.row, self.raises = row, raises

    def score_frames(self, frames: Tensor, prompts: object, metadata: object) -> RewardBatch:
        assert frames.dtype == torch.uint8
        if self.raises:
            raise RewardError(self.label, "unreadable", (self.row,))
        return RewardBatch(tuple(math.nan if row == self.row else 0.0 for row in range(len(frames))))


@pytest.mark.parametrize("raises", [True, False])
def test_the_error_for_a_frame_names_its_sample(raises: bool) -> None:
    video = PIXELS.expand(3, 4, 3, 8, 8)
    with pytest.raises(RewardError) as caught:
        FailsOnRow(row=9, raises=raises).score(video, PROMPTS, METADATA)
    assert caught.value.samples == (2,)


def test_a_batch_has_parts_of_the_same_length() -> None:
    with pytest.raises(ValueError, match="part 'p'"):
        RewardBatch((1.0, 2.0), {"p": (1.0,)})


def test_a_reward_without_its_package_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "digenrl.rewards.ocr", raising=False)
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(ConfigError, match=r"rapidocr.*digenrl\[ocr\]"):
        build_reward(parse_reward("ocr"))
