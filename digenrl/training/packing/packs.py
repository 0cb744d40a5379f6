"""Which terms go into which forward, and to which rank.

A term is one summand of the loss: one sample at one step, or two samples compared at one step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from digenrl.models.objective import Advantages, Objective
from digenrl.models.trajectory import ScoredGroup, Trajectory
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


def terms_of(
    group: ScoredGroup,
    advantages: Advantages,
    objective: Objective,
    *,
    units: Collection[int] | None = None,
    samples: Collection[int] | None = None,
) -> list[Term]:
    """The terms of a group in their order, or those of some units or samples.

    A unit is a sample, or a pair that is compared, counted among the chosen ones. A pair belongs to its first
    sample.
    """
    couples = zip(*[iter(advantages.chosen)] * objective.rows_per_term, strict=True)
    return [
        Term(
            trajectories=tuple(group.trajectories[index] for index in couple),
            advantages=tuple(advantages.values[index] for index in couple),
            step=step,
        )
        for unit, couple in enumerate(couples)
        if (units is None or unit in units) and (samples is None or couple[0] in samples)
        for step in objective.trained_steps(group.trajectories[couple[0]].plan)
    ]


def calibration_terms(group: ScoredGroup, objective: Objective) -> list[Term]:
    """The terms of all samples of a group, with made-up advantages."""
    samples = range(len(group.trajectories))
    if len(samples) < 2:
        raise ValueError(f"calibration needs a group of at least 2 samples, got {len(samples)}")
    chosen = samples[: len(samples) // objective.rows_per_term * objective.rows_per_term]
    advantages = Advantages(tuple(1.0 if index % 2 else -1.0 for index in samples), tuple(chosen))
    return terms_of(group, advantages, objective)


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
