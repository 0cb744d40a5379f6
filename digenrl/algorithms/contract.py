"""What every algorithm is: an objective for the trainer, and what it wants from a rollout.

`GroupRelative` holds what the algorithms share, which is nearly all but the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Protocol

from pydantic import Field

from digenrl.algorithms.advantages import (
    AdvantageSettings,
    centered,
    checked_rewards,
    clamped,
    has_spread,
    std_of,
)
from digenrl.config.reading import ConfigError, Frozen
from digenrl.models.objective import Advantages, LossTerms, Needs, Objective, PairBatch
from digenrl.models.trajectory import RolloutPlan


class AlgorithmSettings(Frozen):
    """What every algorithm can be told."""

    advantage: AdvantageSettings = AdvantageSettings()
    updates_per_batch: int = Field(default=1, ge=1)


class Algorithm(Objective, Protocol):
    """An objective that also says how its samples are to be generated."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> AlgorithmSettings: ...

    @property
    def same_initial_noise(self) -> bool:
        """Whether the samples of a group start from the same noise."""

    @property
    def rollout_window(self) -> Mapping[str, object]:
        """Which steps are stochastic and kept, unless a recipe says otherwise: the generating side's settings."""


class GroupRelative(ABC):
    """Advantages relative to the group, all samples trained on the same number of steps."""

    name: ClassVar[str]
    replays: Literal["steps", "renoised"] = "steps"
    rows_per_term: Literal[1, 2] = 1
    same_initial_noise: bool = False
    rollout_window: ClassVar[Mapping[str, object]]

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def scale_over(self) -> Literal["group", "batch"]:
        return self.settings.advantage.std_over

    @property
    def clamp(self) -> float:
        return self.settings.advantage.clamp

    @property
    def updates_per_batch(self) -> int:
        return self.settings.updates_per_batch

    def group_advantages(self, rewards: Sequence[float]) -> Advantages:
        checked_rewards(rewards)
        advantages = centered(rewards)
        if not has_spread(rewards):
            return Advantages(tuple(0.0 for _ in rewards), chosen=())
        if self.scale_over == "group":
            divisor = std_of(rewards, self.settings.advantage.ddof) + self.settings.advantage.eps
            advantages = tuple(advantage / divisor for advantage in advantages)
        return Advantages(advantages, self.chosen(advantages))

    def chosen(self, advantages: Sequence[float]) -> tuple[int, ...]:
        """The samples to train on, of a group with spread."""
        return tuple(range(len(advantages)))

    def scale(self, rewards_by_group: Sequence[Sequence[float]]) -> float:
        if self.scale_over == "group":
            return 1.0
        everything = [reward for rewards in rewards_by_group for reward in checked_rewards(rewards)]
        return 1 / (std_of(everything, self.settings.advantage.ddof) + self.settings.advantage.eps)

    def batch_advantages(self, rewards_by_group: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
        scale = self.scale(rewards_by_group)
        groups = [self.group_advantages(rewards) for rewards in rewards_by_group]
        return [tuple(clamped(value * scale, self.clamp) for value in group.values) for group in groups]

    def terms_per_group(self, group_size: int, plan: RolloutPlan) -> int:
        return self.samples_per_group(group_size) * len(self.trained_steps(plan))

    def samples_per_group(self, group_size: int) -> int:
        """How many of a group's samples are trained, where it has spread."""
        return group_size

    def trained_steps(self, plan: RolloutPlan) -> tuple[int, ...]:
        return plan.kept_steps

    def old_policy_decay(self, batch: int) -> float:
        return 0.0

    @abstractmethod
    def loss(self, pairs: PairBatch) -> LossTerms: ...


def leading_steps(fraction: float, steps: int) -> tuple[int, ...]:
    """The first int(fraction * steps) steps of a schedule, and never its last."""
    count = min(int(fraction * steps), steps - 1)
    if count < 1:
        raise ConfigError(f"trained_fraction: {fraction} of {steps} steps leaves none to train; raise either")
    return tuple(range(count))
