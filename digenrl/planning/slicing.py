"""Slices of their own for pools of unlike cards: larger ones where a card has room for them and they pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from digenrl.planning.bounds import least_makespan
from digenrl.planning.candidates import Candidate, pace_of
from digenrl.planning.constants import Constants
from digenrl.planning.layout import can_help, lane_sizes
from digenrl.planning.workload import Workload


def better_slices(
    candidate: Candidate,
    makespan_s: float,
    workload: Workload,
    constants: Constants,
    makespan: Callable[[Candidate], float],
    least_gain: float,
    tries: int,
) -> Candidate:
    """The same plan with slices per pool, after at most `tries` simulations; itself where none pays `least_gain`.

    One pool's slice or the unit is changed at a time, the most promising change first, for as long as it pays.
    """
    best, best_s = candidate, makespan_s
    seen: set[tuple[int, tuple[int, ...]]] = set()
    queue = _moves(best, workload, constants)
    while queue and tries:
        move = queue.pop(0)
        key = (move.slice_size, move.own_slices)
        if key in seen or move.bound_s >= best_s * (1 - least_gain):
            continue
        seen.add(key)
        tries -= 1
        seconds = makespan(move)
        if seconds < best_s * (1 - least_gain):
            best, best_s = move, seconds
            queue = _moves(best, workload, constants)
    return best


def _moves(candidate: Candidate, workload: Workload, constants: Constants) -> list[Candidate]:
    """Every plan with another slice for one pool, or with a smaller unit and the same slices, best bound first."""
    return sorted(_changed(candidate, workload, constants), key=lambda move: move.bound_s)


def _changed(candidate: Candidate, workload: Workload, constants: Constants) -> Iterator[Candidate]:
    unit, own = candidate.slice_size, candidate.own_slices
    sizes = [lane_sizes(workload, generator, constants) for generator in candidate.layout.generators]
    for index, fitting in enumerate(sizes):
        for size in fitting:
            if size % unit == 0 and size != own[index]:
                yield _with_slices(candidate, unit, (*own[:index], size, *own[index + 1 :]), workload, constants)
    for smaller in workload.slice_sizes():
        if smaller < unit and unit % smaller == 0 and all(smaller in fitting for fitting in sizes):
            yield _with_slices(candidate, smaller, own, workload, constants)


def _with_slices(
    candidate: Candidate, unit: int, own: tuple[int, ...], workload: Workload, constants: Constants
) -> Candidate:
    policy = candidate.policy
    if policy.help != "none" and not can_help(candidate.layout, unit):
        policy = policy.model_copy(update={"help": "none"})
    pace = pace_of(workload, candidate.layout, unit, policy, candidate.pace.steps, constants, own)
    return replace(
        candidate, slice_size=unit, policy=policy, pace=pace, bound_s=least_makespan(pace), pool_slices=own
    )
