"""AWM, advantage weighted matching: the flow matching error of a sample takes the place of its log-probability.

Final latents are noised again. The formula is that of `compute_log_prob_awm` (weighting `ghuber`, loss type
`exp_first`) in scripts/train_sd3_awm.py of https://github.com/scxue/advantage_weighted_matching.
"""

from __future__ import annotations

from torch import Tensor

from digenrl.algorithms.lagging_policy import LaggingPolicy
from digenrl.algorithms.policy_loss import clipped, squared_distance_R
from digenrl.config.algorithms import AwmSettings
from digenrl.models.objective import LossTerms, PairBatch, RenoisedPairs

SMALLEST_ERROR = 1e-10  # keeps the power of an error differentiable at 0


class Awm(LaggingPolicy):
    """The clipped loss of rho = exp(l - l_old), l = -(sigma / p) e^p, e the mean squared error of the velocity."""

    settings_type = AwmSettings
    settings: AwmSettings

    def loss(self, pairs: PairBatch) -> LossTerms:
        assert isinstance(pairs, RenoisedPairs)
        matching_R = self._matching_R(pairs, pairs.velocity_RL)
        old_RL = pairs.old_velocity_RL
        old_matching_R = matching_R.detach() if old_RL is None else self._matching_R(pairs, old_RL)
        ratio_R = (matching_R - old_matching_R).exp()
        scaled_R, outside_R = clipped(-pairs.advantage_R / self.clamp, ratio_R, self.settings.clip)
        measures = {"ratio": ratio_R.detach(), "clipped": outside_R.to(ratio_R.dtype)}
        fixed_R = None
        if pairs.reference_velocity_RL is not None:
            kl_R = squared_distance_R(pairs.velocity_RL, pairs.reference_velocity_RL)
            fixed_R = self.settings.kl_weight * kl_R
            measures["kl"] = kl_R.detach()
        if old_RL is not None and self.settings.old_kl_weight > 0:
            old_kl_R = self.settings.old_kl_weight * squared_distance_R(pairs.velocity_RL, old_RL)
            fixed_R = old_kl_R if fixed_R is None else fixed_R + old_kl_R
        return LossTerms(scaled_R, fixed_R, measures)

    def _matching_R(self, pairs: RenoisedPairs, velocity_RL: Tensor) -> Tensor:
        """-(sigma / p) e^p."""
        error_R = squared_distance_R(velocity_RL, pairs.noise_RL - pairs.final_RL)
        power = self.settings.power
        powered_R: Tensor = (error_R + SMALLEST_ERROR) ** power - SMALLEST_ERROR**power
        return -pairs.sigma_R * powered_R / power
