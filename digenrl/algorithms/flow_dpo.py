"""Flow-DPO: in every group the best sample is preferred to the worst, at the same noise and time.

Groups are generated, or they are pairs of images in a file; with `error: noise` it is then Diffusion-DPO.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import functional

from digenrl.algorithms.advantages import checked_rewards, has_spread
from digenrl.algorithms.contract import GroupRelative
from digenrl.algorithms.policy_loss import squared_distance_R
from digenrl.config.algorithms import FlowDpoSettings
from digenrl.models.objective import Advantages, LossTerms, PairBatch, RenoisedPairs


class FlowDpo(GroupRelative):
    """A term has two rows: the best sample of a group, then the worst."""

    settings_type = FlowDpoSettings
    settings: FlowDpoSettings

    def group_advantages(self, rewards: Sequence[float]) -> Advantages:
        checked_rewards(rewards)
        indices = range(len(rewards))
        best = max(indices, key=lambda index: rewards[index])
        worst = min(indices, key=lambda index: rewards[index])
        if not has_spread(rewards):
            return Advantages(tuple(0.0 for _ in indices), chosen=())
        advantages = tuple(1.0 if index == best else -1.0 if index == worst else 0.0 for index in indices)
        return Advantages(advantages, chosen=(best, worst))

    def loss(self, pairs: PairBatch) -> LossTerms:
        assert isinstance(pairs, RenoisedPairs) and pairs.reference_velocity_RL is not None
        target_RL = pairs.noise_RL - pairs.final_RL
        excess_R = squared_distance_R(pairs.velocity_RL, target_RL) - squared_distance_R(
            pairs.reference_velocity_RL, target_RL
        )
        if self.settings.error == "noise":
            excess_R = excess_R * (1 - pairs.sigma_R) ** 2
        margin_M = -self.settings.beta / 2 * (excess_R[0::2] - excess_R[1::2])
        measures = {"preferred": (margin_M.detach() > 0).to(margin_M.dtype)}
        return LossTerms(scaled_M=None, fixed_M=-functional.logsigmoid(margin_M), measures=measures)
