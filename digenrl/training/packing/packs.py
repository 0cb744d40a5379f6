"""Which terms go into which forward, and to which rank.

A term is one summand of the loss: one sample at one step, or two samples compared at one step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from digenrl.models.contract import Conditioning
from digenrl.models.objective import Advantages, Objective
from digenrl.models.trajectory import ScoredGroup, ScoredSamples, Trajectory
from digenrl.training.ranks.rank import Rank

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the loss: the trajectories and advantages of its rows, the schedule's step, and its weight.

    A term of weight 0 is padding: it takes part in a forward and counts nowhere.
    """

    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...]
    step: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """What a replay needs of some samples of a group: the prompt's conditioning, and trajectories by sample."""

    conditioning: Conditioning
    trajectories: Mapping[int, Trajectory]

    @classmethod
    def of(cls, samples: ScoredSamples) -> ReplayInputs:
        """Those of scored samples."""
        return cls(samples.conditioning, {each.sample.index: each for each in samples.trajectories})

    def joined(self, other: ReplayInputs | None) -> ReplayInputs:
        """Those of more samples of the same group."""
        return (
            self if other is None else ReplayInputs(self.conditioning, {**other.trajectories, **self.trajectories})
        )


def rows_of_terms(
    advantages: Advantages,
    objective: Objective,
    *,
    units: Collection[int] | None = None,
    samples: Collection[int] | None = None,
) -> list[tuple[int, ...]]:
    """The samples of each unit of a group that is trained, or of some units or samples.

    A unit is a sample, or a pair that is compared, counted among the chosen ones. A pair belongs to its first
    sample.
    """
    couples = zip(*[iter(advantages.chosen)] * objective.rows_per_term, strict=True)
    return [
        couple
        for unit, couple in enumerate(couples)
        if (units is None or unit in units) and (samples is None or couple[0] in samples)
    ]


def terms_of(
    inputs: ReplayInputs,
    advantages: Advantages,
    objective: Objective,
    *,
    units: Collection[int] | None = None,
    samples: Collection[int] | None = None,
) -> list[Term]:
    """The terms of a group in their order, or those of some units or samples, as `rows_of_terms` selects them."""
    return [
        Term(
            trajectories=tuple(inputs.trajectories[index] for index in couple),
            advantages=tuple(advantages.values[index] for index in couple),
            step=step,
        )
        for couple in rows_of_terms(advantages, objective, units=units, samples=samples)
        for step in objective.trained_steps(inputs.trajectories[couple[0]].plan)
    ]


def calibration_terms(group: ScoredGroup, objective: Objective, job_samples: int) -> list[list[Term]]:
    """The terms of all samples of a group, with placeholder advantages, split into jobs of `job_samples`."""
    samples = range(len(group.trajectories))
    if len(samples) < 2:
        raise ValueError(f"calibration needs a group of at least 2 samples, got {len(samples)}")
    chosen = samples[: len(samples) // objective.rows_per_term * objective.rows_per_term]
    advantages = Advantages(tuple(1.0 if index % 2 else -1.0 for index in samples), tuple(chosen))
    jobs = [samples[first : first + job_samples] for first in samples[::job_samples]]
    return [terms_of(ReplayInputs.of(group), advantages, objective, samples=job) for job in jobs]


def share_of(items: Sequence[Item], rank: Rank, offset: int) -> list[Item]:
    """Every count-th item. Shares differ by at most one; the offset decides which ranks get one more."""
    return [item for place, item in enumerate(items) if (place + offset) % rank.count == rank.index]


def padded(terms: Sequence[Term], size: int, like: Term) -> list[Term]:
    """The terms followed by as much padding as makes them `size` terms."""
    return [*terms, *[replace(like, weight=0.0)] * (size - len(terms))]


def halves(items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
    """Both halves in order; the first one is not smaller."""
    middle = (len(items) + 1) // 2
    return items[:middle], items[middle:]
