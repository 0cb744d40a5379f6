"""Hands slices to idle lanes. Every open step has one list, which all lanes share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence

from digenrl.records import Generate, Slice
from digenrl.scheduling.changes import replace
from digenrl.scheduling.dispatch import Reservations, assign_by_finish, first_unreserved
from digenrl.scheduling.order import slice_at
from digenrl.scheduling.repeated_steps import is_served, recorded_as_stale, stale_budget
from digenrl.scheduling.staleness import admitted_samples
from digenrl.scheduling.state import GroupProgress, SchedulerState, StepProgress, give_lanes


class SlicePicker:
    """The unstarted slices of the open steps, in order. Local to one decision; `steps()` is the outcome.

    Places count from the front over all open steps: 0 is the next slice.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._lists = [_OpenList(state, step) for step in state.steps]

    def length_at(self, version: int, place: int, at_most: int) -> int:
        """How many slices can be taken together from `place` on: neighbors of one group that may start.

        It is 0 if the slice at the place, or one before it, may not start on this version.
        """
        return self._found(version, place, at_most)[1]

    def may_start(self, version: int, current_step_only: bool = False) -> bool:
        """Whether the next slice may start on this version. Optionally it must belong to the current step."""
        if current_step_only and not self._lists[0].unstarted():
            return False
        return self.length_at(version, 0, 1) > 0

    def take(self, version: int, place: int, at_most: int) -> Slice | None:
        """Takes the slices that `length_at` counts, as one piece."""
        steps_list, length, place = self._found(version, place, at_most)
        return steps_list.take(place, length, version) if steps_list and length else None

    def unstarted(self, current_step_only: bool = False) -> int:
        """The number of slices in the lists, whether they may start yet or not."""
        lists = self._lists[:1] if current_step_only else self._lists
        return sum(steps_list.unstarted() for steps_list in lists)

    def _found(self, version: int, place: int, at_most: int) -> tuple[_OpenList | None, int, int]:
        """The list that a place is in, how many slices can be taken there, and its place in that list."""
        for steps_list in self._lists:
            left, admitted = steps_list.unstarted(), steps_list.admitted_slices(version)
            if place < left:
                return steps_list, steps_list.length_at(place, min(at_most, admitted - place)), place
            if admitted < left:
                break
            place -= left
        return None, 0, place

    def steps(self) -> tuple[StepProgress, ...]:
        """The open steps without what was taken."""
        return tuple(steps_list.closed() for steps_list in self._lists)


class _OpenList:
    """One step's list while slices are being taken from it: first what is reissued, then the rest."""

    def __init__(self, state: SchedulerState, step: StepProgress) -> None:
        self._step = step
        self._terms = terms = state.terms
        self._budget = stale_budget(terms, step)
        self._repeats = step.recorded is not None and is_served(state, step.index - 1)
        self._waiting: list[Slice] = list(step.reissue)
        self._cursor, self._end = step.cursor, terms.slices_per_step
        self._ahead: list[int] = list(step.ahead)  # positions from the cursor on that are not handed out any more
        self._stale_samples = step.stale_samples
        self._stale_groups: dict[int, int] = {}
        self._touched = False
        self._skip_ahead()

    def unstarted(self) -> int:
        return len(self._waiting) + self._end - self._cursor - len(self._ahead)

    def admitted_slices(self, version: int) -> int:
        """How many slices may start on this version, whether or not the list has that many.

        Slices that are recorded as stale come first, and wait for a lane that serves the version one behind.
        """
        step, size = self._step, self._terms.slice_size
        if version >= step.index and self._repeats and self._waiting:
            room = self._stale_samples + size <= self._budget
            if room and recorded_as_stale(step, self._waiting[0]):
                return 0
        return admitted_samples(step.index, version, self._stale_samples, self._budget) // size

    def length_at(self, place: int, at_most: int) -> int:
        if at_most <= 1:
            return max(0, at_most)
        if place < len(self._waiting):
            return self._neighbors_waiting(place, at_most)
        return sum(1 for _ in self._neighbors_listed(self._position(place), at_most))

    def take(self, place: int, length: int, version: int) -> Slice:
        if place < len(self._waiting):
            first = self._waiting[place]
            del self._waiting[place : place + length]
        else:
            position = self._position(place)
            first = slice_at(self._terms, self._step.index, position)
            self._mark_started(position, length)
        piece = replace(first, size=length * first.size) if length > 1 else first
        self._touched = True
        if version < self._step.index:
            self._stale_samples += piece.size
            self._stale_groups[piece.group] = self._stale_groups.get(piece.group, 0) | piece.mask()
        return piece

    def closed(self) -> StepProgress:
        if not self._touched:
            return self._step
        return replace(
            self._step,
            cursor=self._cursor,
            reissue=tuple(self._waiting),
            groups=self._groups_with_stale_marks(),
            stale_samples=self._stale_samples,
            ahead=tuple(self._ahead),
        )

    def _position(self, place: int) -> int:
        """The position of the slice at a place behind all that is reissued."""
        ahead, position = self._ahead, self._cursor + place - len(self._waiting)
        if not ahead or position < ahead[0]:
            return position
        # Every position in `ahead` that is not behind it moves it by one.
        return position + bisect_right(range(len(ahead)), position, key=lambda nth: ahead[nth] - nth)

    def _neighbors_waiting(self, place: int, at_most: int) -> int:
        waiting, length = self._waiting, 1
        while length < at_most and place + length < len(waiting):
            before, here = waiting[place + length - 1], waiting[place + length]
            if (before.group, before.first + before.size) != (here.group, here.first):
                break
            length += 1
        return length

    def _neighbors_listed(self, position: int, at_most: int) -> Iterator[int]:
        """Positions of up to `at_most` unstarted slices that follow each other in one group."""
        terms = self._terms
        if terms.order == "generation":
            stride, turns = 1, terms.slices_per_group - position % terms.slices_per_group
        else:
            stride, turns = terms.prompts, terms.slices_per_group - position // terms.prompts
        for turn in range(min(at_most, turns)):
            at = position + turn * stride
            nth = bisect_left(self._ahead, at)
            if nth < len(self._ahead) and self._ahead[nth] == at:
                return
            yield at

    def _mark_started(self, position: int, length: int) -> None:
        for at in [position] if length == 1 else list(self._neighbors_listed(position, length)):
            if at == self._cursor:
                self._cursor += 1
            else:
                insort(self._ahead, at)
        self._skip_ahead()

    def _skip_ahead(self) -> None:
        passed = 0
        while passed < len(self._ahead) and self._ahead[passed] == self._cursor:
            self._cursor += 1
            passed += 1
        del self._ahead[:passed]

    def _groups_with_stale_marks(self) -> tuple[GroupProgress, ...]:
        if not self._stale_groups:
            return self._step.groups
        groups = list(self._step.groups)
        for index, samples in self._stale_groups.items():
            groups[index] = replace(groups[index], stale=groups[index].stale | samples)
        return tuple(groups)


Taken = Sequence[tuple[int, Slice]]  # lanes and what they have taken, in this order


def hand_out_slices(state: SchedulerState, at_ns: int) -> tuple[SchedulerState, tuple[Generate, ...]]:
    """Gives slices to idle generator lanes, fastest first, as far as slices may start."""
    if not state.idle:
        return state, ()
    picker = SlicePicker(state)
    if state.terms.dispatch == "earliest_finish":
        return issue_slices(state, picker, _take_by_finish(state, picker, at_ns), at_ns)
    return issue_slices(state, picker, take_from_front(state, picker, state.idle), at_ns)


def take_from_front(state: SchedulerState, picker: SlicePicker, lanes: Iterable[int]) -> Taken:
    """Every lane takes as many slices as it can at once, from the front of the list."""
    taken: list[tuple[int, Slice]] = []
    for index in lanes:
        lane = state.lanes[index]
        piece = picker.take(lane.version, 0, lane.slices_at_once)
        if piece is not None:
            taken.append((index, piece))
    return taken


def _take_by_finish(state: SchedulerState, picker: SlicePicker, at_ns: int) -> Taken:
    """Every lane takes the first piece that no other lane would finish sooner, or none."""
    able = [index for index in state.idle if picker.may_start(state.lanes[index].version)]
    if not able:
        return ()
    able.sort(key=lambda index: (state.lanes[index].slice_ns, -state.lanes[index].version))
    reservations = Reservations(state, able, picker.unstarted(), at_ns, picker.may_start)
    taken: dict[int, Slice] = {}

    def take(nth: int, at_most: int) -> bool:
        lane = state.lanes[able[nth]]
        place, length = first_unreserved(
            lambda place: picker.length_at(lane.version, place, at_most),
            lambda length: reservations.before(lane.index, length),
        )
        piece = picker.take(lane.version, place, length) if length else None
        if piece is None:
            return False
        taken[lane.index] = piece
        reservations.taken(lane.index, length)
        return True

    at_once = [state.lanes[index].slices_at_once for index in able]
    assign_by_finish(at_once, lambda nth: able[nth] not in taken, take)
    return tuple(taken.items())


def issue_slices(
    state: SchedulerState, picker: SlicePicker, taken: Taken, at_ns: int
) -> tuple[SchedulerState, tuple[Generate, ...]]:
    """Generate jobs for what lanes have taken from the picker."""
    if not taken:
        return state, ()
    jobs = tuple(
        Generate(job_id, at_ns, piece, index, state.lanes[index].version)
        for job_id, (index, piece) in enumerate(taken, start=state.jobs_issued)
    )
    return replace(give_lanes(state, jobs), steps=picker.steps()), jobs
