"""Accumulates the gradient of the open update group by group, and finishes it when the update is complete.

The scalar of an update is L = (1 / Z) sum of w * l over its terms, with Z counted before any forward. No statistic
crosses terms, so the gradient does not depend on the order of groups, the size of packs or the number of ranks:
not even in its last bit on the order (see `sum_in_order`), and only by rounding on the others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from digenrl.training.advantage_scale import AdvantageScale
from digenrl.training.gradients import Gradients, add_into, scaled
from digenrl.training.metrics import Tally
from digenrl.training.offload.switching import Switching
from digenrl.training.open_batch import GroupEntry, OpenBatch
from digenrl.training.ordered_sums import OrderedSums
from digenrl.training.packing.packed_passes import PackedPasses, PassContext, PassResult
from digenrl.training.packing.packs import Term
from digenrl.training.policy_weights import PolicyWeights
from digenrl.training.ranks.rank_group import RankGroup


class GradientAccumulator:
    """The gradient sums of the open update."""

    def __init__(
        self,
        scale: AdvantageScale,
        passes: PackedPasses,
        sums: OrderedSums,
        switching: Switching,
    ) -> None:
        self._scale, self._passes, self._sums, self._switching = scale, passes, sums, switching

    @property
    def tally(self) -> Tally:
        """The metrics of the groups that were added."""
        return self._sums.total.tally

    def begin_update(self, batch: OpenBatch) -> None:
        """Discards all sums and starts the batch's open update."""
        self._sums.reset(batch.places())

    def add(self, batch: OpenBatch, place: int, entry: GroupEntry) -> None:
        """Adds a group of the open update. If it raises, nothing was added."""
        result = self._run(batch, place, entry, batch.terms(place, entry))
        with self._switching.adding_to_sums():
            self._sums.add(place, result)
        entry.trained = True
        if not self._scale.over_batch and not batch.is_replayed_later(place):
            entry.group = None  # else samples may be replayed once more, for the clamp or by a later update

    def gradient(self, batch: OpenBatch, policies: PolicyWeights, ranks: RankGroup | None) -> Gradients:
        """The gradient of the complete open update, over all ranks; for a sharded model this rank's shards."""
        factor = self._scale.factor(batch.rewards_by_group())
        with self._switching.reading_sums():
            total = self._sums.total.sums.total(factor)
        if self._scale.over_batch:
            add_into(total, scaled(self._clamp_corrections(batch, factor), factor))
        mean_factor = batch.mean_factor()
        if mean_factor != 1:
            total = scaled(total, mean_factor)
        if ranks is None or policies.sharded:
            return total
        # A rank with an empty share has no gradients, but takes part in the sum.
        total = {name: _value_or_zeros(total, name, p.data) for name, p in policies.parameters.items()}
        ranks.sum_tensors(total)
        return total

    def _clamp_corrections(self, batch: OpenBatch, factor: float) -> Gradients:
        """Replays the samples that exceed the clamp once scaled, with the difference as their weight."""
        result = PassResult()
        for place in batch.places():
            entry = batch.entries[place]
            weights = self._scale.correction_weights(entry.advantages, factor)
            terms = [
                replace(term, weight=weights[term.trajectories[0].sample.index])
                for term in batch.terms(place, entry, weights)
            ]
            result.add(self._run(batch, place, entry, terms, only_unscaled=True))
        return result.sums.unscaled

    def _run(
        self, batch: OpenBatch, place: int, entry: GroupEntry, terms: list[Term], only_unscaled: bool = False
    ) -> PassResult:
        assert entry.group is not None
        context = PassContext(
            conditioning=entry.group.conditioning,
            denominator=batch.denominator(entry),
            before_updates=batch.update == 0,
            only_unscaled=only_unscaled,
            place=place,
        )
        return self._passes.run(terms, context)


def _value_or_zeros(gradients: Gradients, name: str, like: Tensor) -> Tensor:
    return gradients[name] if name in gradients else torch.zeros_like(like)
