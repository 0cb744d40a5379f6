"""Which terms go into which forward, and to which rank: index arithmetic alone.

A term is one summand of the loss: one sample at one step, or two samples compared at one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from digenrl.models.objective import Advantages, Objective
from digenrl.models.trajectory import ScoredGroup, Trajectory

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Term:
    """One summand: its rows' trajectories and advantages, the step of the schedule, and its weight in the sum.

    One of weight 0 is a filler: it takes part in a forward and counts nowhere.
    """

    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...]
    step: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Rank:
    """This trainer's place among all that share a batch."""

    index: int = 0
    count: int = 1


def terms_of(
    group: ScoredGroup, advantages: Advantages, objective: Objective, samples: Iterable[int]
) -> list[Term]:
    """The terms of some of a group's samples, sample by sample; a couple belongs to the first of the two."""
    wanted = set(samples)
    couples = list(zip(*[iter(advantages.chosen)] * objective.rows_per_term, strict=True))
    return [
        Term(
            trajectories=tuple(group.trajectories[index] for index in couple),
            advantages=tuple(advantages.values[index] for index in couple),
            step=step,
        )
        for couple in couples
        if couple[0] in wanted
        for step in objective.trained_steps(group.trajectories[couple[0]].plan)
    ]


def share_of(items: Sequence[Item], rank: Rank, offset: int) -> list[Item]:
    """Every count-th item: shares differ by one at most, and another offset gives the odd ones to other ranks."""
    return [item for place, item in enumerate(items) if (place + offset) % rank.count == rank.index]


def filled_up(share: Sequence[Term], terms: Sequence[Term], count: int) -> list[Term]:
    """A share of these terms with fillers after it, so that the shares of all `count` ranks are equally long."""
    largest = -(-len(terms) // count)
    return [*share, *(filler(terms[0]) for _ in range(largest - len(share)))]


def filler(term: Term) -> Term:
    """One like it that counts nowhere."""
    return replace(term, weight=0.0)


def cut(items: Sequence[Item], largest: int) -> list[Sequence[Item]]:
    """Consecutive packs of `largest` items; the last may be smaller.

    >>> cut("abcdefgh", 3)
    ['abc', 'def', 'gh']
    """
    assert largest >= 1, f"a pack holds at least one item, got {largest}"
    return [items[first : first + largest] for first in range(0, len(items), largest)]


def halves(items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
    """Two packs in the order of the items, the first not the smaller."""
    middle = (len(items) + 1) // 2
    return items[:middle], items[middle:]


def update_of(place: int, groups: int, updates: int) -> int:
    """Which update of a batch a group belongs to: by its place, never by when it arrives.

    >>> [update_of(place, groups=5, updates=2) for place in range(5)]
    [0, 0, 0, 1, 1]
    """
    return place * updates // groups
