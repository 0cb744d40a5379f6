"""Builds rewards from settings. Models and their libraries are loaded here and not before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module

from torch import Tensor

from digenrl.config.rewards.base import RewardSettings
from digenrl.config.rewards.table import REWARDS
from digenrl.rewards.contract import Metadata, Reward, RewardBatch, RewardError
from digenrl.rewards.packages import missing_packages


class WeightedReward(Reward):
    """The sum of raw scores times weights. Parts: `label` for each raw score, `label/part` for its components.

    If one reward fails, the sample has no score: a sum without one of its terms would be another reward.
    """

    def __init__(self, rewards: Sequence[tuple[Reward, float]]) -> None:
        super().__init__(" + ".join(reward.label for reward, _ in rewards))
        assert rewards, "a weighted reward needs at least one"
        self.rewards = tuple(rewards)

    def _score(self, pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> RewardBatch:
        parts: dict[str, tuple[float, ...]] = {}
        weighted = []
        for index, (reward, weight) in enumerate(self.rewards):
            changes = _changes(pixels_BFCHW)
            batch = reward.score(pixels_BFCHW, prompts, metadata)
            if _changes(pixels_BFCHW) != changes and index + 1 < len(self.rewards):
                why = "changes the pixels in place, and the rewards after it would score those"
                raise RewardError(reward.label, f"{why}; let it work on a copy (pixels.clone())")
            weighted.append([weight * value for value in batch.values])
            parts[reward.label] = batch.values
            parts.update({f"{reward.label}/{name}": part for name, part in batch.parts.items()})
        return RewardBatch(tuple(math.fsum(terms) for terms in zip(*weighted, strict=True)), parts)


def _changes(pixels: Tensor) -> int:
    """How often a tensor was changed in place. Tensors of inference mode do not count it."""
    return 0 if pixels.is_inference() else pixels._version


def build_reward(settings: RewardSettings) -> Reward:
    """One reward, without its weight, from `build` of digenrl/rewards/<name>.py."""
    assert settings.name in REWARDS, f"{settings.name} is not in the table of rewards"
    try:
        reward = import_module(f"digenrl.rewards.{settings.name}").build(settings)
    except ModuleNotFoundError as error:
        raise missing_packages(settings, [error.name or str(error)]) from error
    assert isinstance(reward, Reward)
    return reward


def build_rewards(
    settings: Sequence[RewardSettings], loaded: Sequence[tuple[RewardSettings, Reward]] = ()
) -> WeightedReward:
    """All rewards of a recipe as one weighted sum. Rewards that are `loaded` already are used again."""

    def built(one: RewardSettings) -> Reward:
        same = (reward for known, reward in loaded if known.model_copy(update={"weight": one.weight}) == one)
        return next(same, None) or build_reward(one)

    return WeightedReward([(built(one), one.weight) for one in settings])
