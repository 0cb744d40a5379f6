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
    """The idle lanes that should take a slice now, quickest first; the others leave theirs to quicker lanes."""
    lanes = [lane for lane in state.lanes if lane.present and (state.terms.colocated or not lane.helper)]
    free_from = {lane.index: lane.lease.started_ns + lane.slice_ns if lane.lease else at_ns for lane in lanes}
    chosen: list[int] = []
    for slice_ns, of_equal_speed in groupby(state.idle, key=lambda index: state.lanes[index].slice_ns):
        candidates = list(of_equal_speed)
        left = startable(state.lanes[candidates[0]].version) - len(chosen)
        times = ((free_from[lane.index], lane.slice_ns) for lane in lanes)
        wanted = slices_not_finished_before(times, at_ns + slice_ns, left)
        for index in candidates[:wanted]:
            chosen.append(index)
            free_from[index] = at_ns + slice_ns
    return tuple(chosen)


def slices_not_finished_before(lanes: Iterable[tuple[int, int]], deadline_ns: int, left: int) -> int:
    """Of `left` slices, how many would not be finished strictly before the deadline by these lanes."""
    return max(0, left - finished_before(lanes, deadline_ns))


def finished_before(lanes: Iterable[tuple[int, int]], deadline_ns: int) -> int:
    """How many further slices lanes of (free from, slice time) would finish strictly before the deadline.

    >>> finished_before([(0, 2), (3, 2)], deadline_ns=6)
    3
    """
    return sum(max(0, (deadline_ns - free_ns - 1) // slice_ns) for free_ns, slice_ns in lanes)
