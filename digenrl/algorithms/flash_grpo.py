"""Flash-GRPO: one stochastic, trained step per sample, the same for a group, and gradients made equal over time.

The log-prob's gradient by the velocity grows with |d mu / d v| / s, which depends on the step. The weight lambda
is the inverse, s / |d mu / d v|, as in `sde_step_with_logprob` (its last return value) and in the table of
scripts/train_wanx2_1_flash.py, both of https://github.com/Shredded-Pork/Flash-GRPO.
"""

from __future__ import annotations

from torch import Tensor

from digenrl.algorithms.policy_loss import PolicyLoss
from digenrl.config.algorithms import FlashGrpoSettings
from digenrl.models.objective import StepPairs


class FlashGrpo(PolicyLoss):
    """The authors divide lambda by its mean over a micro-batch; here the divisor is a setting."""

    settings_type = FlashGrpoSettings
    settings: FlashGrpoSettings

    def row_weight_R(self, pairs: StepPairs) -> Tensor:
        return rectification_R(pairs) / self.settings.mean_weight


def rectification_R(pairs: StepPairs) -> Tensor:
    """lambda = 1 / (h / s + s (1 - sigma) / (2 sigma)), for steps of a diffusion: s = g sqrt(h)."""
    drift_R = pairs.std_R * (1 - pairs.sigma_R) / (2 * pairs.sigma_R)
    return 1 / (pairs.step_size_R / pairs.std_R + drift_R)
