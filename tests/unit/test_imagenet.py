"""The reward imagenet on photographs that scikit-image contains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from skimage import data
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.imagenet_classes import class_indices
from digenrl.config.rewards.table import parse_reward
from digenrl.rewards.building import build_reward
from digenrl.rewards.contract import Reward, RewardError

CATS = ["tabby", "tiger cat", "Egyptian cat"]


@pytest.fixture(scope="module")
def photographs() -> list[Tensor]:
    """A cat, and a cup of espresso, (1, 1, 3, H, W) of different sizes."""
    return [torch.from_numpy(each).permute(2, 0, 1)[None, None] / 255 for each in (data.chelsea(), data.coffee())]


@pytest.fixture(scope="module")
def reward() -> Reward:
    return build_reward(parse_reward({"name": "imagenet", "classes": "espresso", "device": "cpu"}))


def test_the_wanted_object_is_likely_only_where_it_is(reward: Reward, photographs: list[Tensor]) -> None:
    cat, coffee = (reward.score(each, ["a photo"], [{"class": None}]) for each in photographs)
    assert cat.values[0] < 0.01 and cat.parts["correct"] == (0.0,)
    assert coffee.values[0] > 0.9 and coffee.parts["correct"] == (1.0,)


def test_several_classes_can_be_wanted_by_name_or_index(reward: Reward, photographs: list[Tensor]) -> None:
    cats = torch.cat([photographs[0]] * 4)
    wanted: list[Any] = [*CATS, CATS]
    scores = reward.score(cats, ["a cat"] * 4, [{"class": each} for each in wanted]).values
    assert 0.8 < scores[3] <= 1 and scores[3] == pytest.approx(sum(scores[:3]), abs=1e-6)
    by_index = reward.score(photographs[0], ["a cat"], [{"class": [281, 282, 285, "Tabby "]}]).values
    assert by_index[0] == pytest.approx(scores[3], abs=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tabi", r"'tabi'.*0 to 999; did you mean 'tabby'"),
        (1000, "1000"),
        (True, "True"),
        ([], "at least one"),
    ],
)
def test_unknown_classes_are_refused(given: Any, message: str, reward: Reward, photographs: list[Tensor]) -> None:
    with pytest.raises(RewardError, match=message) as error:
        reward.score(torch.cat([photographs[1]] * 2), ["a"] * 2, [{}, {"class": given}])
    assert error.value.samples == (1,)
    with pytest.raises(ConfigError, match=message):
        parse_reward({"name": "imagenet", "classes": given if isinstance(given, list) else [given]})


def test_the_wanted_object_must_be_known(photographs: list[Tensor]) -> None:
    with pytest.raises(RewardError, match="metadata `class` or the key `classes`"):
        build_reward(parse_reward({"name": "imagenet", "device": "cpu"})).score(photographs[0], ["a"], [{}])


def test_names_and_indices_are_those_of_imagenet() -> None:
    assert class_indices(["tench", "goldfish", "tabby", "espresso", "toilet tissue"]) == (0, 1, 281, 967, 999)
