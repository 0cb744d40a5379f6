"""Jobs: the samples of a group that are replayed together. Their results add up to the gradient of an update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SampleJob:
    """The job at a place of the batch that begins with this sample of the group."""

    place: int
    first: int

    def __str__(self) -> str:
        return f"samples {self.first} and up at place {self.place}"


@dataclass(frozen=True, slots=True)
class JobSplit:
    """Cuts groups of `group_size` samples into jobs of `job_samples`, which divides it."""

    group_size: int
    job_samples: int

    @property
    def jobs_per_group(self) -> int:
        return self.group_size // self.job_samples

    def jobs(self, place: int, samples: Iterable[int] | None = None) -> list[SampleJob]:
        """The jobs of the group at a place, or those with some of its samples, in ascending order."""
        samples = range(self.group_size) if samples is None else samples
        return [
            SampleJob(place, first) for first in sorted({index - index % self.job_samples for index in samples})
        ]

    def samples(self, job: SampleJob) -> range:
        return range(job.first, job.first + self.job_samples)

    def is_whole(self, first: int, size: int) -> bool:
        """Whether these consecutive samples are whole jobs."""
        return first % self.job_samples == 0 and size % self.job_samples == 0 and first + size <= self.group_size

    def has(self, job: SampleJob) -> bool:
        return self.is_whole(job.first, self.job_samples) and job.first >= 0
