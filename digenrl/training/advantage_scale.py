"""How advantages get their scale: from the group, or from all rewards of the batch once they are known.

This is the only place that depends on an objective's `scale_over`. If the scale is the batch's, groups are trained
with unscaled advantages as they arrive. The accumulated gradient is scaled when the batch is complete, and samples
whose scaled advantage exceeds the clamp are replayed with the difference as their weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from digenrl.models.objective import Advantages, LossTerms, Objective, check_advantages, check_scale


class AdvantageScale:
    """The scale of an objective's advantages, known per group or only per batch."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.over_batch = objective.scale_over == "batch"

    @property
    def sums_per_parameter(self) -> int:
        """How many gradient tensors a parameter may have: two if only a part of the loss awaits the scale.

        What pulls the policy towards another one does not await it.
        """
        needs = self._objective.needs
        return 2 if self.over_batch and (needs.reference or needs.old_policy) else 1

    def trained_advantages(self, rewards: Sequence[float]) -> Advantages:
        """A group's advantages as its terms are trained with them: final and clamped, or awaiting the scale."""
        advantages = self._objective.group_advantages(rewards)
        check_advantages(self._objective, advantages, len(rewards))
        if self.over_batch:
            return advantages
        clamp = self._objective.clamp
        return replace(advantages, values=tuple(max(-clamp, min(clamp, each)) for each in advantages.values))

    def loss_parts(self, loss: LossTerms) -> tuple[Tensor | None, Tensor | None]:
        """The parts of a loss whose gradients await the scale, and whose gradients are final."""
        return (loss.scaled_M, loss.fixed_M) if self.over_batch else (None, loss.total_M())

    def factor(self, rewards_by_group: Sequence[Sequence[float]]) -> float:
        """The factor of the gradient that awaits the scale, from all rewards of the batch in the groups' order."""
        if not self.over_batch:
            return 1.0
        scale = self._objective.scale(rewards_by_group)
        check_scale(self._objective, scale)
        return scale

    def correction_weights(self, advantages: Advantages, factor: float) -> dict[int, float]:
        """By sample that exceeds the clamp once scaled: the weight that corrects its gradient."""
        clamp = self._objective.clamp
        return {
            index: clamp / (abs(advantage) * factor) - 1
            for index, advantage in enumerate(advantages.values)
            if abs(advantage) * factor > clamp
        }
