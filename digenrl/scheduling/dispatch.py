"""Which idle lane takes which slices: `eager` and `earliest_finish`.

`eager` gives every idle lane the next slices at once. `earliest_finish` guarantees: whenever a lane is given a
piece, no other lane that may start it, counted from when it is free, would have finished that piece earlier after
everything that comes before it in the list. So no group waits for a slow lane while a fast one could have made
the same slices earlier. If all lanes take one slice at a time, this holds for all other lanes together: even
without idle time, they would not have reached and finished that slice earlier.

A lane finds its piece by counting the slices that others finish first. Consider another lane that is free at f and
needs T for a piece of this length and t for a full job. It has jobs reserved at f, f + t, f + 2t, ... as long as
the piece, started at that time, would be finished before this lane would finish it. Reserved slices are skipped:
a slow lane starts behind them, or takes nothing if the list ends before. Reservations are not binding; every
decision counts them again. If a lane that takes several slices finds no such piece, it looks for a single slice.
Otherwise two lanes could leave the last slices to each other, if one is faster with one slice and the other with
two.

The scheduler and the forecast share these rules. The scheduler applies them to lanes, the forecast to classes of
equal lanes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from digenrl.records import Generate, LaneOffer
from digenrl.scheduling.state import Lane, SchedulerState


def assign_by_finish(
    slices_at_once: Sequence[int], idle: Callable[[int], int], take: Callable[[int, int], bool]
) -> None:
    """Offers pieces to idle lanes, or classes of lanes, in this order until none takes any more.

    `idle` gives the number of idle lanes of a class. `take` gives a lane of it the first piece of up to this many
    slices that no other lane would finish sooner, and returns False if there is none.
    """
    again = True
    while again:
        again = False
        for lane_class, at_once in enumerate(slices_at_once):
            while idle(lane_class):
                if take(lane_class, at_once):
                    continue
                if at_once == 1 or not take(lane_class, 1):
                    break
                again = True  # lanes that had left this slice to the lane may take what follows


def first_unreserved(length_at: Callable[[int], int], reserved: Callable[[int], int]) -> tuple[int, int]:
    """The place and length of the first piece before which no more slices are reserved than stand there.

    `length_at` gives the length of the piece at a place, 0 beyond the end of the list; `reserved` the number of
    slices that others would finish before a piece of this length. The length is 0 if there is no such piece.
    """
    place = before = counted = 0  # `before` is reserved before a piece of `counted` slices
    while length := length_at(place):
        if length != counted:
            before, counted = reserved(length), length
        if before <= place:
            break
        place = before
    return place, length


def reserved_before(lanes: Iterable[tuple[Lane | LaneOffer, int, int]], length: int, deadline_ns: int) -> int:
    """Slices reserved for these lanes before a piece that another lane would finish at the deadline.

    Entries are (offer, when free, number of such lanes).

    >>> lanes = [(LaneOffer("fast", 2), 0, 1), (LaneOffer("busy", 2), 3, 1)]
    >>> reserved_before(lanes, length=1, deadline_ns=6)
    3
    """
    total = 0
    for lane, free_ns, count in lanes:
        every_ns, at_once = lane.slice_ns, lane.slices_at_once
        first_ns = every_ns if length == at_once else piece_ns(lane, length)
        left_ns = deadline_ns - free_ns - first_ns - 1
        if left_ns >= 0:
            total += count * (left_ns // every_ns + 1) * at_once
    return total


def reserved_before_each(
    lanes: Iterable[tuple[Lane | LaneOffer, int]], length: int, deadlines_ns: Sequence[int], listed: int
) -> list[int]:
    """`reserved_before` for many deadlines, soonest first. No lane counts beyond the end of the list.

    >>> lanes = [(LaneOffer("fast", 2), 0), (LaneOffer("busy", 2), 3)]
    >>> reserved_before_each(lanes, length=1, deadlines_ns=[2, 6], listed=8)
    [0, 3]
    """
    first_ns, last_ns = deadlines_ns[0], deadlines_ns[-1]
    total, more = 0, [0] * (len(deadlines_ns) + 1)
    for lane, free_ns in lanes:
        every_ns, at_once = lane.slice_ns, lane.slices_at_once
        done_ns = free_ns + piece_ns(lane, length)  # if it were the lane's next
        jobs = max(0, (first_ns - done_ns - 1) // every_ns + 1)
        total += jobs * at_once
        done_ns += jobs * every_ns
        while done_ns < last_ns and jobs * at_once < listed:
            more[bisect_right(deadlines_ns, done_ns)] += at_once
            done_ns += every_ns
            jobs += 1
    return [total + further for further in accumulate(more[:-1])]


def piece_ns(lane: Lane | LaneOffer, slices: int) -> int:
    """The time in which a lane generates this many slices, in full jobs and a last one for the rest."""
    if slices == lane.slices_at_once:
        return lane.slice_ns
    jobs, rest = divmod(slices, lane.slices_at_once)
    return jobs * lane.slice_ns + (lane.expected_ns(rest) if rest else 0)


class Reservations:
    """What other lanes would finish first, while idle lanes take slices one after the other at one instant."""

    def __init__(
        self, state: SchedulerState, able: Sequence[int], listed: int, at_ns: int, may_start: Callable[[int], bool]
    ) -> None:
        """`able` are the idle lanes that may start a slice, fastest first; other idle lanes do not count.

        `listed` is the number of unstarted slices. `may_start` says whether one may start on a version: busy lanes
        on other versions do not count either.
        """
        self._lanes, self._at_ns, self._able, self._listed = state.lanes, at_ns, able, listed
        self._free_ns = _busy_until(state, at_ns, may_start) | dict.fromkeys(able, at_ns)
        self._at_first: dict[int, dict[int, int]] = {}  # by length: what is reserved before each idle lane's piece
        # By length, then by slices at once: the times for a piece of lanes that have taken theirs.
        self._done: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))

    def before(self, index: int, length: int) -> int:
        """Slices reserved for others before a piece of this length that this idle lane would take."""
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
            self._at_first.clear()  # it is free earlier than these counts assume
            self._done.clear()
            return
        for counted in self._at_first:
            insort(self._done[counted][lane.slices_at_once], piece_ns(lane, counted))

    def _counted(self, lane: Lane, length: int) -> int:
        free = self._free_ns.items()
        others = ((self._lanes[index], free_ns, 1) for index, free_ns in free if index != lane.index)
        return reserved_before(others, length, self._at_ns + lane.expected_ns(length))

    def _count_for_all_idle(self, length: int) -> None:
        idle = [
            index
            for index in self._able
            if self._lanes[index].slices_at_once == length and self._free_ns[index] == self._at_ns
        ]
        deadlines = [self._at_ns + self._lanes[index].slice_ns for index in idle]
        lanes = ((self._lanes[index], free_ns) for index, free_ns in self._free_ns.items())
        counts = reserved_before_each(lanes, length, deadlines, self._listed)
        self._at_first[length] = dict(zip(idle, counts, strict=True))


def _busy_until(state: SchedulerState, at_ns: int, may_start: Callable[[int], bool]) -> dict[int, int]:
    """When each busy generator lane is expected to be free. Overdue lanes count as free now."""
    lanes = state.present_lanes
    startable = {version: may_start(version) for version in {lane.version for lane in lanes}}
    return {
        lane.index: max(at_ns, expected_end_ns(state, lane))
        for lane in lanes
        if lane.job and lane.calibrated and (state.terms.colocated or not lane.helper) and startable[lane.version]
    }


def expected_end_ns(state: SchedulerState, lane: Lane) -> int:
    """When a busy lane is expected to finish its job."""
    job = lane.job
    assert job is not None
    if not isinstance(job, Generate):
        return job.issued_ns + state.costs.evaluate_ns
    slices = state.terms.slices_in(job.slice.size) if lane.take_ns else 1
    return job.issued_ns + lane.expected_ns(slices)
