"""GRPO-Guard: Flow-GRPO with ratios and gradients normalized across denoising steps.

The log-ratio of a Gaussian step has mean -b under the old policy, b = mean (mu - mu_old)^2 / 2 s^2, and a spread
that grows as 1 / s: rho = exp((logp - logp_old + b) s) has neither. The loss is divided by the step size h.
"""

from __future__ import annotations

from torch import Tensor

from digenrl.algorithms.flow_grpo import FlowGrpo
from digenrl.algorithms.policy_loss import squared_distance_R
from digenrl.config.algorithms import GrpoGuardSettings
from digenrl.models.objective import StepPairs


class GrpoGuard(FlowGrpo):
    """The std s and the step size h are those of each row."""

    settings_type = GrpoGuardSettings

    def log_ratio_R(self, pairs: StepPairs, base_log_prob_R: Tensor) -> Tensor:
        assert pairs.old_mean_RL is not None, "the step means of the rollout are needed"
        bias_R = squared_distance_R(pairs.mean_RL, pairs.old_mean_RL) / (2 * pairs.std_R**2)
        return (pairs.log_prob_R - base_log_prob_R + bias_R) * pairs.std_R

    def row_weight_R(self, pairs: StepPairs) -> Tensor:
        return 1 / pairs.step_size_R
