"""The contract of an algorithm: an objective for the trainer, built from settings.

`GroupRelative` implements everything except the loss. docs/extending.md says how to add an algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from digenrl.algorithms.advantages import centered, checked_rewards, has_spread, std_of
from digenrl.config.algorithms import AlgorithmSettings
from digenrl.models.objective import Advantages, Objective
from digenrl.models.trajectory import RolloutPlan


class GroupRelative(Objective):
    """Advantages relative to the group; the same number of trained steps for every sample."""

    settings_type: ClassVar[type[AlgorithmSettings]] = AlgorithmSettings

    def group_advantages(self, rewards: Sequence[float]) -> Advantages:
        checked_rewards(rewards)
        advantages = centered(rewards)
        if not has_spread(rewards):
            zeros = tuple(0.0 for _ in rewards)
            return Advantages(zeros, self.chosen(zeros) if self.zero_spread_groups == "trained" else ())
        if self.settings.advantage.std_over == "group":
            divisor = std_of(rewards, self.settings.advantage.ddof) + self.settings.advantage.eps
            advantages = tuple(advantage / divisor for advantage in advantages)
        return Advantages(advantages, self.chosen(advantages))

    def chosen(self, advantages: Sequence[float]) -> tuple[int, ...]:
        """The indices of the samples to train on."""
        return tuple(range(len(advantages)))

    def scale(self, rewards_by_group: Sequence[Sequence[float]]) -> float:
        if self.scale_over == "group":
            return 1.0
        everything = [reward for rewards in rewards_by_group for reward in checked_rewards(rewards)]
        return 1 / (std_of(everything, self.settings.advantage.ddof) + self.settings.advantage.eps)

    def units_per_group(self, group_size: int) -> int:
        return self.settings.trained_samples(group_size) // self.rows_per_term

    def trained_steps(self, plan: RolloutPlan) -> tuple[int, ...]:
        if self.replays == "steps":
            return plan.kept_steps
        return tuple(range(self.settings.trained_steps(plan.schedule.steps)))

    def old_policy_decay(self, batch: int) -> float:
        return 0.0
