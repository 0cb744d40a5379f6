"""Which idle lane takes which slices.

`eager` gives every idle lane the next slices at once. `earliest_finish` keeps a promise: whenever a lane is handed
a piece, no other lane, counted from when it is free, would have finished that very piece earlier after everything
that stands before it in the list. So no group waits for a slow lane while a quick one could have made the same
slices earlier. Where all lanes take one slice at a time it holds for all the others together: each going on
without a pause, they would not have come to that slice and finished it earlier.

A lane finds its piece by counting what others finish first. One that is free at f, makes a piece of this length in
T and a take of its own in t, has takes reserved at f, f + t, f + 2t, ... as long as the piece, begun then, would
be finished before this lane's deadline. What is reserved is left standing: a slow lane starts behind it, or takes
nothing where the list ends before that. Reservations bind nobody; they are counted anew at every decision. A lane
that would take several slices and finds no such piece looks for a single one: else lanes could leave the last
slices to each other, one being the quicker with one slice and the other with two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from digenrl.records import Generate, LaneOffer
from digenrl.scheduling.state import Lane, SchedulerState


class Reservations:
    """What other lanes would finish first, while idle lanes take slices one after the other at one instant."""

    def __init__(self, state: SchedulerState, able: Sequence[int], listed: int, at_ns: int) -> None:
        """`able` are the idle lanes that may start a slice, the quickest first; other idle ones do not count.

        So many slices are `listed` as unstarted: who has that many reserved leaves nothing to others.
        """
        self._lanes, self._at_ns, self._able, self._listed = state.lanes, at_ns, able, listed
        self._free_ns = _busy_until(state, at_ns) | dict.fromkeys(able, at_ns)
        self._at_first: dict[int, dict[int, int]] = {}  # by length: what is reserved before each idle lane's piece
        # By length, then by slices at once: the times for a piece of lanes that have taken theirs.
        self._done: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))

    def before(self, index: int, length: int) -> int:
        """How many slices are reserved for others before a piece of so many that this idle lane would take."""
        lane = self._lanes[index]
        if length != lane.slices_at_once:
            return self._counted(lane, length)
        if length not in self._at_first:
            self._count_for_all_idle(length)
        takes_ns = lane.slice_ns
        gone = sum(at_once * bisect_left(times, takes_ns) for at_once, times in self._done[length].items())
        return self._at_first[length][index] - gone

    def taken(self, index: int, length: int) -> None:
        """The lane is busy from now on with a piece of this length."""
        lane = self._lanes[index]
        self._free_ns[index] = self._at_ns + lane.expected_ns(length)
        if length < lane.slices_at_once:
            self._at_first.clear()  # it is free earlier than was counted on
            self._done.clear()
            return
        for counted in self._at_first:
            insort(self._done[counted][lane.slices_at_once], piece_ns(lane, counted))

    def _counted(self, lane: Lane, length: int) -> int:
        others = ((self._lanes[index], free_ns) for index, free_ns in self._free_ns.items() if index != lane.index)
        return reserved_before(others, length, [self._at_ns + lane.expected_ns(length)], self._listed)[0]

    def _count_for_all_idle(self, length: int) -> None:
        idle = [
            index
            for index in self._able
            if self._lanes[index].slices_at_once == length and self._free_ns[index] == self._at_ns
        ]
        deadlines = [self._at_ns + self._lanes[index].slice_ns for index in idle]
        lanes = ((self._lanes[index], free_ns) for index, free_ns in self._free_ns.items())
        counts = reserved_before(lanes, length, deadlines, self._listed)
        self._at_first[length] = dict(zip(idle, counts, strict=True))


def _busy_until(state: SchedulerState, at_ns: int) -> dict[int, int]:
    """When each busy generator lane is expected to be free. Overdue lanes count as free now."""
    return {
        lane.index: max(at_ns, expected_end_ns(state, lane))
        for lane in state.lanes
        if lane.job and (state.terms.colocated or not lane.helper)
    }


def expected_end_ns(state: SchedulerState, lane: Lane) -> int:
    """When a busy lane is expected to finish its job."""
    job = lane.job
    assert job is not None
    if isinstance(job, Generate):
        return job.issued_ns + lane.expected_ns(state.terms.slices_in(job.slice.size))
    return job.issued_ns + state.costs.evaluate_ns


def reserved_before(
    lanes: Iterable[tuple[Lane | LaneOffer, int]], length: int, deadlines_ns: Sequence[int], listed: int
) -> list[int]:
    """For each deadline, soonest first: slices reserved for these lanes, each free from a time on.

    For one lane it counts as far as the list reaches.

    >>> lanes = [(LaneOffer("quick", 2), 0), (LaneOffer("busy", 2), 3)]
    >>> reserved_before(lanes, length=1, deadlines_ns=[2, 6], listed=8)
    [0, 3]
    """
    first_ns, last_ns = deadlines_ns[0], deadlines_ns[-1]
    total, more = 0, [0] * (len(deadlines_ns) + 1)
    for lane, free_ns in lanes:
        every_ns, at_once = lane.slice_ns, lane.slices_at_once
        done_ns = free_ns + piece_ns(lane, length)  # if it were the lane's next
        takes = max(0, (first_ns - done_ns - 1) // every_ns + 1)
        total += takes * at_once
        done_ns += takes * every_ns
        while done_ns < last_ns and takes * at_once < listed:
            more[bisect_right(deadlines_ns, done_ns)] += at_once
            done_ns += every_ns
            takes += 1
    return [total + further for further in accumulate(more[:-1])]


def piece_ns(lane: Lane | LaneOffer, slices: int) -> int:
    """The time in which a lane makes so many slices, in takes of its own and a last one of what remains."""
    if slices == lane.slices_at_once:
        return lane.slice_ns
    takes, rest = divmod(slices, lane.slices_at_once)
    return takes * lane.slice_ns + (lane.expected_ns(rest) if rest else 0)
