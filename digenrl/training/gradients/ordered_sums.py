"""Gradient sums in floating point, whose bits do not depend on the order in which groups arrive."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from digenrl.training.gradients.job_sums import JobSums
from digenrl.training.gradients.sums import Gradients, add_into, scaled
from digenrl.training.metrics import Tally
from digenrl.training.packing.packed_passes import PassResult
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.sample_jobs import SampleJob


class OrderedSums:
    """Adds up the gradients of an update's groups in the order of their places.

    A group that arrives before one with a lower place is held back, with its own gradient. Without `in_order`,
    groups are added as they arrive: this saves memory, but the last bits depend on the order of arrival. `ranks`
    are those over whose sums a gradient is summed: none if the passes have done so already. They sum the gradients
    of `shared` parameters, by default all; others belong to this rank alone.
    """

    takes_jobs = False
    dtype: torch.dtype | None = None

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        in_order: bool,
        ranks: RankGroup | None = None,
        shared: Collection[str] | None = None,
    ) -> None:
        self._in_order, self._ranks = in_order, ranks
        self._shared = {name: p for name, p in parameters.items() if shared is None or name in shared}
        self.reset(())

    def reset(self, places: Iterable[int]) -> None:
        self._total = JobSums()
        self._missing = sorted(places)
        self._held_back: dict[int, JobSums] = {}

    def tally(self) -> Tally:
        return self._total.tally()

    def tensors(self) -> dict[str, Tensor]:
        held = {f"place {place}": each for place, each in self._held_back.items()}
        return {
            name: value
            for owner, sums in {"total": self._total, **held}.items()
            for name, value in sums.tensors(owner).items()
        }

    def of_job(self, job: SampleJob, result: PassResult) -> JobSums:
        return JobSums(result.sums, {job: result.tally})

    def add(self, place: int, added: JobSums) -> None:
        if not self._in_order:
            self._total.add(added)
            return
        self._held_back[place] = added
        while self._missing and self._missing[0] in self._held_back:
            self._total.add(self._held_back.pop(self._missing.pop(0)))

    def gradient(self, factor: float, corrections: JobSums) -> Gradients:
        total = self._total.gradient.total(factor)
        add_into(total, scaled(corrections.gradient.unscaled, factor))
        if self._ranks is None:
            return total
        # A rank with an empty share has no gradients, but takes part in the sum.
        first = next(iter(self._shared.values()))
        marks = torch.tensor([float(name in total) for name in self._shared], device=first.device)
        summed = {name: total.pop(name, torch.zeros_like(p.data)) for name, p in self._shared.items()}
        self._ranks.sum_tensors(summed | {"marks": marks})
        counts = zip(summed.items(), marks.tolist(), strict=True)
        return total | {name: value for (name, value), count in counts if count}
