"""MixGRPO: stochastic steps only in a window that moves along the schedule as training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from digenrl.algorithms.advantages import GroupSampleStd
from digenrl.algorithms.policy_loss import PolicyLoss, PolicyLossSettings


class MixGrpoSettings(PolicyLossSettings):
    """The std is a group's own, so that a group's gradient is final as soon as it is scored."""

    advantage: GroupSampleStd = GroupSampleStd()
    updates_per_batch: int = Field(default=4, ge=1)


class MixGrpo(PolicyLoss):
    """Euler steps outside the window, which advances by one every 25 batches."""

    name = "mix_grpo"
    settings: MixGrpoSettings
    rollout_window: ClassVar[Mapping[str, object]] = {
        "kind": "sliding",
        "width": 4,
        "training_steps_per_shift": 25,
    }
