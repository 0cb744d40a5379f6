"""Which idle lane takes the next slice.

`eager` gives every idle lane a slice at once. `earliest_finish` lets a slow lane pass when quicker lanes, busy
ones included, would finish everything that is left before the slow one could finish a single slice: it is the
tail of a step that a slow lane must not hold up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from digenrl.scheduling.state import SchedulerState


def leave_for_a_quicker_lane(
    state: SchedulerState, startable: Callable[[int], int], at_ns: int
) -> tuple[int, ...]:
    """The idle lanes that should take a slice now, quickest first; the others leave theirs to quicker lanes.

    `startable` says how many slices may start on a version. An idle lane whose weights are too old for any of them
    neither takes one nor is counted on.
    """
    startable_on = {
        version: startable(version) for version in {state.lanes[index].version for index in state.idle}
    }
    able = [index for index in state.idle if startable_on[state.lanes[index].version]]
    if not able:
        return ()
    free_from = _free_from(state, able, at_ns)
    if _more_left_than_lanes(state, able, startable_on, free_from, at_ns):
        return tuple(able)
    chosen: list[int] = []
    for slice_ns, of_equal_speed in groupby(able, key=lambda index: state.lanes[index].slice_ns):
        candidates = sorted(of_equal_speed, key=lambda index: -state.lanes[index].version)
        left = startable_on[state.lanes[candidates[0]].version] - len(chosen)
        wanted = slices_not_finished_before(_times(state, free_from), at_ns + slice_ns, left)
        for index in candidates[:wanted]:
            chosen.append(index)
            free_from[index] = at_ns + slice_ns
    return tuple(chosen)


def _free_from(state: SchedulerState, able: list[int], at_ns: int) -> dict[int, int]:
    """When each lane that counts is free: the busy ones at their expected end, those of `able` now."""
    lanes = (lane for lane in state.lanes if lane.lease and (state.terms.colocated or not lane.helper))
    busy = {lane.index: lane.lease.started_ns + lane.slice_ns for lane in lanes if lane.lease}
    return busy | dict.fromkeys(able, at_ns)


def _times(state: SchedulerState, free_from: dict[int, int]) -> Iterable[tuple[int, int]]:
    return ((free_ns, state.lanes[index].slice_ns) for index, free_ns in free_from.items())


def _more_left_than_lanes(
    state: SchedulerState, able: list[int], startable_on: dict[int, int], free_from: dict[int, int], at_ns: int
) -> bool:
    """Whether even the slowest idle lane is needed: the middle of a step, settled without a look at each lane."""
    slowest_ns = state.lanes[able[-1]].slice_ns
    fewest = min(startable_on[state.lanes[index].version] for index in able)
    return fewest - len(able) >= finished_before(_times(state, free_from), at_ns + slowest_ns)


def slices_not_finished_before(lanes: Iterable[tuple[int, int]], deadline_ns: int, left: int) -> int:
    """Of `left` slices, how many would not be finished strictly before the deadline by these lanes."""
    return max(0, left - finished_before(lanes, deadline_ns))


def finished_before(lanes: Iterable[tuple[int, int]], deadline_ns: int) -> int:
    """How many further slices lanes of (free from, slice time) would finish strictly before the deadline.

    >>> finished_before([(0, 2), (3, 2)], deadline_ns=6)
    3
    """
    return sum(max(0, (deadline_ns - free_ns - 1) // slice_ns) for free_ns, slice_ns in lanes)
