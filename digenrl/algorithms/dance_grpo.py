"""DanceGRPO: a clipped policy loss over a random subset of each sample's steps, optionally best-of-N."""

from __future__ import annotations

from collections.abc import Sequence

from digenrl.algorithms.policy_loss import PolicyLoss
from digenrl.config.algorithms import DanceGrpoSettings


class DanceGrpo(PolicyLoss):
    """Samples of a group share their initial noise; each is trained on its own random subset of steps."""

    settings_type = DanceGrpoSettings
    settings: DanceGrpoSettings

    def chosen(self, advantages: Sequence[float]) -> tuple[int, ...]:
        selection = self.settings.best_of_n
        if selection is None:
            return super().chosen(advantages)
        self.settings.trained_samples(len(advantages))  # raises if the group is too small
        by_rank = sorted(range(len(advantages)), key=lambda index: (-advantages[index], index))
        return tuple(sorted(by_rank[: selection.top] + by_rank[-selection.bottom :]))
