"""GRPO-Guard: Flow-GRPO with ratios brought to one scale over the steps, and gradients to one size.

The log-ratio of a Gaussian step has mean -b under the old policy, b = mean (mu - mu_old)^2 / 2 s^2, and a spread
that grows as 1 / s: rho = exp((logp - logp_old + b) s) has neither. The loss is divided by the step's size h.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import Tensor

from digenrl.algorithms.flow_grpo import FlowGrpo, FlowGrpoSettings
from digenrl.algorithms.policy_loss import squared_distance_R
from digenrl.models.objective import Needs, StepPairs


class GrpoGuardSettings(FlowGrpoSettings):
    """The clip range is for the normalised ratio, which is much closer to 1.

    The ratio is recentred by the generating policy's means, so that stale samples are compared with that policy.
    """

    clip: float = Field(default=2e-6, gt=0, lt=1)
    stale: Literal["plain"] = "plain"


class GrpoGuard(FlowGrpo):
    """s and h are each row's own."""

    name = "grpo_guard"
    settings: GrpoGuardSettings

    @property
    def needs(self) -> Needs:
        return replace(super().needs, step_means=True)

    def log_ratio_R(self, pairs: StepPairs, base_log_prob_R: Tensor) -> Tensor:
        assert pairs.old_mean_RL is not None, "the step means of the rollout are needed"
        bias_R = squared_distance_R(pairs.mean_RL, pairs.old_mean_RL) / (2 * pairs.std_R**2)
        return (pairs.log_prob_R - base_log_prob_R + bias_R) * pairs.std_R

    def row_weight_R(self, pairs: StepPairs) -> Tensor:
        return 1 / pairs.step_size_R
