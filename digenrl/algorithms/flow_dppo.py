"""Flow-DPPO: Flow-GRPO with a trust region given by the exact KL of a step, instead of clipped ratios.

A step is a Gaussian of the same std under every policy, so that its KL follows from two means. The formula is that
of `_flowdppo_kl_adv_loss` in unirl/algorithms/flowdppo.py of https://github.com/Tencent-Hunyuan/UniRL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from digenrl.algorithms.policy_loss import RatioLoss, squared_distance_R
from digenrl.config.algorithms import FlowDppoSettings
from digenrl.models.objective import StepPairs


class FlowDppo(RatioLoss):
    """-A rho, but 0 where the KL reached the threshold and the term would increase it.

    It would if rho > 1 and A > 0, or rho < 1 and A < 0. Terms that lead back to the generating policy stay.
    """

    settings_type = FlowDppoSettings
    settings: FlowDppoSettings

    def limited(self, pairs: StepPairs, ratio_R: Tensor) -> tuple[Tensor, Tensor]:
        assert pairs.old_mean_RL is not None, "the step means of the rollout are needed"
        kl_R = squared_distance_R(pairs.mean_RL, pairs.old_mean_RL) / (2 * pairs.std_R**2)
        leads_away_R = pairs.advantage_R * (ratio_R - 1) > 0
        masked_R = ((kl_R >= self.settings.kl_threshold) & leads_away_R).detach()
        policy_R = -pairs.advantage_R * ratio_R
        return torch.where(masked_R, torch.zeros_like(policy_R), policy_R), masked_R
