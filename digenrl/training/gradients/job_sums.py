"""The gradients and metrics of some jobs, added up; and what the sums of an update do with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from digenrl.training.gradients.sums import Gradients, GradientSums
from digenrl.training.metrics import Tally
from digenrl.training.packing.packed_passes import PassResult
from digenrl.training.sample_jobs import SampleJob


@dataclass(slots=True)
class JobSums:
    """The summed gradient of some jobs, as floats or in fixed point, and the metrics of each.

    `largest` is the largest absolute value of each gradient that was converted to fixed point; it may still be
    computed by a GPU.
    """

    gradient: GradientSums = field(default_factory=GradientSums)
    tallies: dict[SampleJob, Tally] = field(default_factory=dict)
    largest: dict[SampleJob, Tensor] = field(default_factory=dict)

    def add(self, other: JobSums) -> None:
        """Adds the other's jobs; the other must not be used afterwards."""
        self.gradient.add(other.gradient)
        self.tallies |= other.tallies
        self.largest |= other.largest

    def tally(self) -> Tally:
        """The metrics of all jobs, merged in the order of jobs: no bit depends on who added which when."""
        merged = Tally()
        for job in sorted(self.tallies):
            merged.merge(self.tallies[job])
        return merged

    def tensors(self, owner: str) -> dict[str, Tensor]:
        """All gradients, by names that begin with that of their owner."""
        parts = (("unscaled", self.gradient.unscaled), ("final", self.gradient.final))
        return {f"{owner}/{part}/{name}": value for part, gradients in parts for name, value in gradients.items()}


class UpdateSums(Protocol):
    """The gradient sums of the open update. Whole groups can be added; jobs one by one only if `takes_jobs`.

    `dtype` is that of the sums; None is that of the parameters.
    """

    takes_jobs: bool
    dtype: torch.dtype | None

    def reset(self, places: Iterable[int]) -> None:
        """Discards all sums and starts an update whose groups have these places."""

    def tally(self) -> Tally:
        """The metrics of the jobs that were added."""

    def tensors(self) -> dict[str, Tensor]:
        """All gradients that are kept, by unique names."""

    def of_job(self, job: SampleJob, result: PassResult) -> JobSums:
        """The passes over one job, as they are added up; the result must not be used afterwards."""

    def add(self, place: int, added: JobSums) -> None:
        """Adds jobs of the group at a place, which must not be used afterwards."""

    def gradient(self, factor: float, corrections: JobSums) -> Gradients:
        """factor * (unscaled + corrections) + final, over all ranks, in new tensors.

        For a sharded model, this rank's shards of it. Raises FloatingPointError if it is not finite.
        """
