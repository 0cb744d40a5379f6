"""From settings to rewards. Models and their libraries are loaded here and not before."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from digenrl.config.reading import ConfigError
from digenrl.config.rewards import REWARDS, RewardSettings
from digenrl.rewards.contract import Reward
from digenrl.rewards.weighted import WeightedReward


def build_reward(settings: RewardSettings) -> Reward:
    """One reward, without its weight, as `build` of digenrl/rewards/<name>.py makes it."""
    assert settings.name in REWARDS, f"{settings.name} is not in the dictionary of rewards"
    try:
        reward = import_module(f"digenrl.rewards.{settings.name}").build(settings)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reward '{settings.name}' needs the package '{error.name}', which is not installed; "
            f"install DigenRL with the extra that docs/rewards.md names for it"
        ) from error
    assert isinstance(reward, Reward)
    return reward


def build_rewards(settings: Sequence[RewardSettings]) -> WeightedReward:
    """All rewards of a recipe as one: the weighted sum of the raw scores, each kept as a named part."""
    return WeightedReward([(build_reward(one), one.weight) for one in settings])
