"""Gradient sums in fixed point: the total has the same bits for any order and any split over trainers.

The gradient of a job is converted once, to the integers round(g * 2**48), and integer addition is associative. The
resolution is 3.6e-15. Values up to 2**14 can be added, and sums up to 2**15 fit into 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite

import torch
from torch import Tensor, nn

from digenrl.models.transfers import to_host
from digenrl.training.gradients.job_sums import JobSums
from digenrl.training.gradients.joined import alike, join, split
from digenrl.training.gradients.sums import Gradients, GradientSums, add_into
from digenrl.training.metrics import Tally
from digenrl.training.packing.packed_passes import PassResult
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.sample_jobs import SampleJob

UNITS_PER_ONE = 2.0**48
LARGEST_VALUE = 2.0**14  # of a job's gradient, exclusive
LARGEST_SUM = 2.0**15 - 1  # of the largest values of all jobs; leaves room for rounding
NOT_FINITE = "check the algorithm's loss, the rewards and the learning rate"
UNCHANGED = (
    "the weights are unchanged; check rewards and learning rate or, unless several cards train, "
    "set training.sum_in_order=false to add gradients as floats"
)


@dataclass(frozen=True, slots=True)
class _Range:
    """A bound of the absolute values of some sums, and why they cannot be used, in words."""

    bound: float
    problem: str | None


class FixedPointSums:
    """Adds up the gradients of an update's jobs as integers, in any order. On several ranks, sums them exactly.

    The range of values is checked when the gradient is read, as that waits for a GPU. `over_batch` says that a
    part of the gradient awaits the batch's scale.
    """

    takes_jobs = True
    dtype: torch.dtype | None = torch.int64

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, over_batch: bool, ranks: RankGroup | None = None
    ) -> None:
        self._parameters, self._over_batch, self._ranks = parameters, over_batch, ranks
        self.reset(())

    def reset(self, places: Iterable[int]) -> None:
        self._total = JobSums()
        self._shared_bound = 0.0

    def tally(self) -> Tally:
        return self._total.tally()

    def tensors(self) -> dict[str, Tensor]:
        return self._total.tensors("total")

    def of_job(self, job: SampleJob, result: PassResult) -> JobSums:
        largest: list[Tensor] = []
        unscaled, final = (_as_integers(part, largest) for part in (result.sums.unscaled, result.sums.final))
        if not largest:
            return JobSums(tallies={job: result.tally})
        return JobSums(GradientSums(unscaled, final), {job: result.tally}, {job: torch.stack(largest).max()})

    def add(self, place: int, added: JobSums) -> None:
        self._total.add(added)

    def gradient(self, factor: float, corrections: JobSums) -> Gradients:
        found = self._range(self._total, corrections)
        sums, more = self._total.gradient, corrections.gradient.unscaled
        if self._ranks is not None:
            sums, more = self._over_ranks(self._ranks, more, found), {}
        elif found.problem is not None:
            raise FloatingPointError(found.problem)
        unscaled, more, final = alike([sums.unscaled, more, sums.final], self._parameters)
        gradient: Gradients = {}
        for names in unscaled | more | final:
            integers = [part[names] for part in (unscaled, more) if names in part]
            floats = [_sum_of(integers).double() * (factor / UNITS_PER_ONE)] if integers else []
            floats += [final[names].double() / UNITS_PER_ONE] if names in final else []
            for name, value in split({names: _sum_of(floats)}, self._parameters).items():
                gradient[name] = value.to(self._parameters[name].dtype)
        return {name: gradient[name] for name in self._parameters if name in gradient}

    def take(self) -> tuple[JobSums, float]:
        """The sums, which start over here, and a bound of absolute values: infinite if one is out of range."""
        found, taken = self._range(self._total), self._total
        taken.largest = {}  # the bound has them
        self.reset(())
        return taken, found.bound if found.problem is None else inf

    def add_share(self, shared: JobSums, bound: float) -> None:
        """Adds jobs that another trainer has summed; on several ranks, the first one adds them."""
        if self._ranks is None or self._ranks.rank.is_first:
            own, device = self._total.gradient, self._device
            for sums, more in ((own.unscaled, shared.gradient.unscaled), (own.final, shared.gradient.final)):
                for names, value in more.items():
                    # Sums change in place, and a share may be mapped from a file.
                    more[names] = value.to(device, copy=names not in sums)
            self._total.add(shared)
            self._shared_bound += bound

    def _over_ranks(self, ranks: RankGroup, corrections: Gradients, found: _Range) -> GradientSums:
        """The integers summed over all ranks. A rank with an empty share adds zeros.

        A parameter without a gradient on all ranks has none, as on a single one. Raises FloatingPointError on all
        ranks if values of one are out of range.
        """
        summed = GradientSums(final=self._zeros())
        unscaled, final, corrections = (
            split(part, self._parameters)
            for part in (self._total.gradient.unscaled, self._total.gradient.final, corrections)
        )
        add_into(summed.final, final)
        if self._over_batch:
            summed.unscaled = self._zeros()
            add_into(summed.unscaled, unscaled)
            add_into(summed.unscaled, corrections)
        present = final.keys() | unscaled.keys() | corrections.keys()
        has_gradient = [name in present for name in self._parameters]
        marks = torch.tensor([found.problem is not None, *has_gradient], device=self._device, dtype=torch.int64)
        ranks.sum_tensors(JobSums(summed).tensors("all ranks") | {"marks": marks})
        problems, *counts = marks.tolist()
        if problems:
            raise FloatingPointError(found.problem or f"gradients of another rank are out of range; {UNCHANGED}")
        for name, count in zip(self._parameters, counts, strict=True):
            if not count:
                summed.final.pop(name)
                summed.unscaled.pop(name, None)
        return summed

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _zeros(self) -> Gradients:
        return {name: torch.zeros_like(p.data, dtype=torch.int64) for name, p in self._parameters.items()}

    def _range(self, *sums: JobSums) -> _Range:
        """The range of these sums on this rank, with jobs that others have added up. Waits for a GPU."""
        problem, bound = None, self._shared_bound
        for each in sums:
            each.largest = dict(zip(each.largest, to_host(list(each.largest.values())), strict=True))
            for job, largest in each.largest.items():
                value = float(largest)
                if not isfinite(value):
                    problem = f"gradients of {job} are {value:g}; the weights are unchanged; {NOT_FINITE}"
                elif not value < LARGEST_VALUE:
                    problem = (
                        f"gradients of {job} reach {value:g}, expected less than {LARGEST_VALUE:g}; {UNCHANGED}"
                    )
                bound += value
        limit = LARGEST_SUM if self._ranks is None else LARGEST_SUM / self._ranks.rank.count
        if problem is None and not bound < limit:
            found = f"could add up to {bound:g}, more than {limit:g}" if bound < inf else "are out of range"
            problem = f"gradients of an update {found}; {UNCHANGED}"
        return _Range(bound, problem)


def _as_integers(gradients: Gradients, largest: list[Tensor]) -> Gradients:
    """The gradients in fixed point, joined, and the largest absolute values of them. Empties the mapping."""
    integers: Gradients = {}
    for names, joined in join(gradients):
        largest.append(torch.maximum(joined.max(), -joined.min()).double())
        joined.mul_(UNITS_PER_ONE).round_()  # exact: a power of two
        if joined.is_cpu:  # 64-bit floats are converted much faster than 32-bit floats, and in place
            joined = joined.double()
            integers[names] = joined.view(torch.int64).copy_(joined)
        else:
            integers[names] = joined.to(torch.int64)
    return integers


def _sum_of(values: list[Tensor]) -> Tensor:
    """The sum of one or two tensors."""
    return values[0] if len(values) == 1 else values[0] + values[1]
