"""Losses of importance ratios and the distance to the reference policy, row by row.

Log-probs are means over a sample's elements, so that a ratio is the true one to the power 1 / elements: a clip of
1e-4 is already loose, and how loose depends on the resolution.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from digenrl.algorithms.contract import GroupRelative
from digenrl.config.algorithms import AlgorithmSettings, KlForm, PolicyLossSettings, RatioLossSettings
from digenrl.models.objective import LossTerms, PairBatch, StepPairs


class RatioLoss(GroupRelative):
    """-A rho, limited to a trust region by `limited`, and, with a weight, the KL to the reference."""

    settings_type: ClassVar[type[AlgorithmSettings]] = RatioLossSettings
    settings: RatioLossSettings

    def loss(self, pairs: PairBatch) -> LossTerms:
        assert isinstance(pairs, StepPairs)
        if self.settings.stale == "plain":
            return self._with_kl(self._weighted(pairs, self.log_ratio_R(pairs, pairs.old_log_prob_R)), pairs)
        proximal_R = pairs.proximal_log_prob_R
        assert proximal_R is not None, "decoupled needs the log-probs recomputed"
        weight_R = self._stale_weight_R(pairs, proximal_R)
        terms = self._weighted(pairs, self.log_ratio_R(pairs, proximal_R), weight_R)
        capped_R = (weight_R >= self.settings.stale_weight_cap).to(weight_R.dtype)
        measures = {**terms.measures, "stale_weight": weight_R, "stale_weight_capped": capped_R}
        return self._with_kl(replace(terms, measures=measures), pairs)

    def _stale_weight_R(self, pairs: StepPairs, proximal_log_prob_R: Tensor) -> Tensor:
        """The importance weight of the step: log-probs are means over elements, a density is their product."""
        elements = pairs.mean_RL[0].numel() if self.settings.stale_weight_of == "step" else 1
        weighs_all = self.settings.weighted == "all"
        generating_R = pairs.rollout_log_prob_R if weighs_all else pairs.old_log_prob_R
        log_weight_R = elements * (proximal_log_prob_R - generating_R)
        return log_weight_R.exp().clamp(max=self.settings.stale_weight_cap).detach()

    def log_ratio_R(self, pairs: StepPairs, base_log_prob_R: Tensor) -> Tensor:
        """The logarithm of rho."""
        return pairs.log_prob_R - base_log_prob_R

    def row_weight_R(self, pairs: StepPairs) -> Tensor | None:
        """A factor on the policy term of every row, or None."""
        return None

    @abstractmethod
    def limited(self, pairs: StepPairs, ratio_R: Tensor) -> tuple[Tensor, Tensor]:
        """The policy term of every row, and whether the row is outside the trust region."""

    def _weighted(self, pairs: StepPairs, log_ratio_R: Tensor, weight_R: Tensor | None = None) -> LossTerms:
        ratio_R = log_ratio_R.exp()
        policy_R, outside_R = self.limited(pairs, ratio_R)
        for factor_R in (weight_R, self.row_weight_R(pairs)):
            policy_R = policy_R if factor_R is None else policy_R * factor_R
        measures = {"ratio": ratio_R.detach(), "clipped": outside_R.to(ratio_R.dtype)}
        return LossTerms(scaled_M=policy_R, fixed_M=None, measures=measures)

    def _with_kl(self, terms: LossTerms, pairs: StepPairs) -> LossTerms:
        if pairs.reference_mean_RL is None:
            return terms
        kl_R = kl_to_reference_R(pairs, self.settings.kl_form)
        measures = {**terms.measures, "kl": kl_R.detach()}
        return LossTerms(terms.scaled_M, self.settings.kl_weight * kl_R, measures)


class PolicyLoss(RatioLoss):
    """max(-A rho, -A clip(rho, 1 -+ c))."""

    settings_type: ClassVar[type[AlgorithmSettings]] = PolicyLossSettings
    settings: PolicyLossSettings

    def limited(self, pairs: StepPairs, ratio_R: Tensor) -> tuple[Tensor, Tensor]:
        return clipped(-pairs.advantage_R, ratio_R, self.settings.clip)


def clipped(weight_R: Tensor, ratio_R: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """max(w rho, w clip(rho, 1 -+ c)) of every row, and whether its rho is outside of 1 -+ c."""
    limited_R = torch.maximum(weight_R * ratio_R, weight_R * ratio_R.clamp(1 - clip, 1 + clip))
    return limited_R, (ratio_R.detach() - 1).abs() > clip


def kl_to_reference_R(pairs: StepPairs, form: KlForm) -> Tensor:
    """The KL between two Gaussian steps of equal std, per row, as a mean over elements."""
    assert pairs.reference_mean_RL is not None
    exact_R = squared_distance_R(pairs.mean_RL, pairs.reference_mean_RL) / (2 * pairs.std_R**2)
    return exact_R if form == "exact" else exact_R * pairs.noise_time_R


def squared_distance_R(left_RL: Tensor, right_RL: Tensor) -> Tensor:
    """mean (left - right)^2 over the elements of every row."""
    return ((left_RL - right_RL) ** 2).flatten(1).mean(1)
