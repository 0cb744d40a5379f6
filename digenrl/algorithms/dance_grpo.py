"""DanceGRPO: a clipped policy loss over a random part of every sample's steps, or of the best and worst alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field

from digenrl.algorithms.advantages import GroupSampleStd
from digenrl.algorithms.policy_loss import PolicyLoss, PolicyLossSettings
from digenrl.config.reading import ConfigError, Frozen


class BestOfN(Frozen):
    """Train on so many of the best and of the worst samples of a group, as they stand in the whole group."""

    top: int = Field(ge=1)
    bottom: int = Field(ge=1)


class DanceGrpoSettings(PolicyLossSettings):
    """All samples of a group are trained unless `best_of_n` selects."""

    advantage: GroupSampleStd = GroupSampleStd()
    best_of_n: BestOfN | None = None


class DanceGrpo(PolicyLoss):
    """Samples of a group share their initial noise; each is trained on its own random choice of steps."""

    name = "dance_grpo"
    settings: DanceGrpoSettings
    same_initial_noise = True
    rollout_window: ClassVar[Mapping[str, object]] = {"kind": "random_subset", "fraction": 0.6}

    def samples_per_group(self, group_size: int) -> int:
        selection = self.settings.best_of_n
        if selection is None:
            return group_size
        count = selection.top + selection.bottom
        if count > group_size:
            raise ConfigError(f"best_of_n: top and bottom are {count} samples, but a group has only {group_size}")
        return count

    def chosen(self, advantages: Sequence[float]) -> tuple[int, ...]:
        selection = self.settings.best_of_n
        if selection is None:
            return super().chosen(advantages)
        self.samples_per_group(len(advantages))
        by_rank = sorted(range(len(advantages)), key=lambda index: (-advantages[index], index))
        return tuple(sorted(by_rank[: selection.top] + by_rank[-selection.bottom :]))
