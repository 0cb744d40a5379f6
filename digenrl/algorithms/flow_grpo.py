"""Flow-GRPO: a clipped policy loss over nearly all steps of a stochastic rollout; Fast: over a few of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from digenrl.algorithms.advantages import WholeBatchStd
from digenrl.algorithms.policy_loss import KlForm, PolicyLoss, PolicyLossSettings


class FlowGrpoSettings(PolicyLossSettings):
    """As the image recipes of Flow-GRPO have it."""

    advantage: WholeBatchStd = WholeBatchStd()
    updates_per_batch: int = Field(default=2, ge=1)
    kl_weight: float = Field(default=0.04, ge=0)
    kl_form: KlForm = "flow_grpo_image"


class FlowGrpo(PolicyLoss):
    """Every step but the last is stochastic and trained."""

    name = "flow_grpo"
    settings: FlowGrpoSettings
    rollout_window: ClassVar[Mapping[str, object]] = {"kind": "all", "fraction": 0.99}


class FlowGrpoFastSettings(FlowGrpoSettings):
    """A tighter clip, and no penalty."""

    clip: float = Field(default=1e-5, gt=0, lt=1)
    kl_weight: float = Field(default=0.0, ge=0)


class FlowGrpoFast(FlowGrpo):
    """Euler steps outside a window in the first half of the schedule, drawn anew for every batch."""

    name = "flow_grpo_fast"
    settings: FlowGrpoFastSettings
    rollout_window: ClassVar[Mapping[str, object]] = {"kind": "fast", "width": 3}
