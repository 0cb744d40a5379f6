"""Flow-GRPO: a clipped policy loss over nearly all steps of a stochastic rollout; Fast: over a few of them."""

from __future__ import annotations

from typing import ClassVar

from digenrl.algorithms.policy_loss import PolicyLoss
from digenrl.config.algorithms import AlgorithmSettings, FlowGrpoFastSettings, FlowGrpoSettings


class FlowGrpo(PolicyLoss):
    """Every step except the last is stochastic and trained."""

    settings_type: ClassVar[type[AlgorithmSettings]] = FlowGrpoSettings


class FlowGrpoFast(FlowGrpo):
    """Euler steps outside a window in the first half of the schedule, drawn anew for every batch."""

    settings_type = FlowGrpoFastSettings
