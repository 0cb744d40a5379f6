"""MixGRPO: stochastic steps only in a window that slides along the schedule during training."""

from __future__ import annotations

from digenrl.algorithms.policy_loss import PolicyLoss
from digenrl.config.algorithms import MixGrpoSettings


class MixGrpo(PolicyLoss):
    """Euler steps outside the window, which by default advances by one every 25 batches."""

    settings_type = MixGrpoSettings
