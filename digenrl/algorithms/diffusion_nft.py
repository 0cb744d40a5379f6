"""DiffusionNFT: no likelihoods; final latents are noised again, and the velocity moves towards good samples.

With q = A / 2M + 1/2 in [0, 1], the loss (M / beta) [q l+ + (1 - q) l-] is the sum of a part linear in A,
A / 2 beta * (l+ - l-), and a part without A, M / 2 beta * (l+ + l-): groups can be streamed as for a policy loss.
"""

from __future__ import annotations

from torch import Tensor

from digenrl.algorithms.lagging_policy import LaggingPolicy
from digenrl.algorithms.policy_loss import squared_distance_R
from digenrl.config.algorithms import DiffusionNftSettings
from digenrl.models.objective import LossTerms, PairBatch, RenoisedPairs

SMALLEST_ERROR = 1e-5  # lower bound of the divisor of the self-normalized error


class DiffusionNft(LaggingPolicy):
    """q l+ + (1 - q) l-, with velocities on both sides of the generating policy's."""

    settings_type = DiffusionNftSettings
    settings: DiffusionNftSettings

    def loss(self, pairs: PairBatch) -> LossTerms:
        assert isinstance(pairs, RenoisedPairs) and pairs.old_velocity_RL is not None
        change_RL = self.settings.beta * (pairs.velocity_RL - pairs.old_velocity_RL)
        towards_R = _normalized_error_R(pairs, pairs.old_velocity_RL + change_RL)
        away_R = _normalized_error_R(pairs, pairs.old_velocity_RL - change_RL)
        half = 1 / (2 * self.settings.beta)
        scaled_R = half * pairs.advantage_R * (towards_R - away_R)
        fixed_R = half * self.clamp * (towards_R + away_R)
        measures = {"towards": towards_R.detach(), "away": away_R.detach()}
        if pairs.reference_velocity_RL is not None:
            kl_R = squared_distance_R(pairs.velocity_RL, pairs.reference_velocity_RL)
            fixed_R = fixed_R + self.settings.kl_weight * kl_R
            measures["kl"] = kl_R.detach()
        return LossTerms(scaled_R, fixed_R, measures)


def _normalized_error_R(pairs: RenoisedPairs, velocity_RL: Tensor) -> Tensor:
    """mean (x0^ - x0)^2 / mean |x0^ - x0|, without gradient through the divisor."""
    sigma_R1 = pairs.sigma_R.view(-1, *[1] * (velocity_RL.dim() - 1))
    error_RL = (pairs.noised_RL - sigma_R1 * velocity_RL - pairs.final_RL).flatten(1)
    size_R = error_RL.detach().abs().mean(1).clamp(min=SMALLEST_ERROR)
    return (error_RL**2).mean(1) / size_R
