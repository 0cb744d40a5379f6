"""Hands slices to idle lanes: one cursor over the steps' lists, shared by all lanes, that skips nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from digenrl.records import Generate, Lease, Slice
from digenrl.scheduling.dispatch import leave_for_a_quicker_lane
from digenrl.scheduling.order import slice_at
from digenrl.scheduling.staleness import may_start
from digenrl.scheduling.state import GroupProgress, SchedulerState, StepProgress
from digenrl.scheduling.terms import Terms


class SlicePicker:
    """The unstarted slices of the open steps, taken in order. Local to one decision; `steps()` is the outcome."""

    def __init__(self, state: SchedulerState) -> None:
        self._terms = state.terms
        self._lists = [_OpenList(state.terms, step) for step in state.steps]

    def peek(self, version: int) -> Slice | None:
        """The next slice, if it may start on this version; None also when nothing is left."""
        for steps_list in self._lists:
            piece = steps_list.first_unstarted()
            if piece is not None:
                return piece if steps_list.admits(piece, version) else None
        return None

    def take(self, version: int) -> Slice | None:
        """Takes what `peek` shows."""
        piece = self.peek(version)
        if piece is not None:
            next(each for each in self._lists if each.step.index == piece.step).take(piece, version)
        return piece

    def startable(self, version: int) -> int:
        """How many slices may start one after the other on this version."""
        total = 0
        for steps_list in self._lists:
            left = steps_list.unstarted()
            admitted = min(left, steps_list.admitted_slices(version))
            total += admitted
            if admitted < left:
                break
        return total

    def current_step_unstarted(self) -> bool:
        """Whether a slice of the current step was never started, or has to be started again."""
        return bool(self._lists) and self._lists[0].first_unstarted() is not None

    def steps(self) -> tuple[StepProgress, ...]:
        """The open steps after everything that was taken."""
        return tuple(steps_list.closed() for steps_list in self._lists)


class _OpenList:
    """One step's list while slices are being taken from it."""

    def __init__(self, terms: Terms, step: StepProgress) -> None:
        self.step = step
        self._terms = terms
        self._cursor = step.cursor
        self._reissued = 0
        self._stale_samples = step.stale_samples
        self._stale_groups: dict[int, int] = {}

    def first_unstarted(self) -> Slice | None:
        if self._reissued < len(self.step.reissue):
            return self.step.reissue[self._reissued]
        while self._cursor < self._terms.slices_per_step:
            piece = slice_at(self._terms, self.step.index, self._cursor)
            if not self.step.groups[piece.group].retired:
                return piece
            self._cursor += 1
        return None

    def admits(self, piece: Slice, version: int) -> bool:
        budget = self._terms.stale_budget
        return may_start(self.step.index, version, self._stale_samples, piece.size, budget)

    def admitted_slices(self, version: int) -> int:
        """How many slices the version rule admits, however many there are."""
        if version >= self.step.index:
            return self._terms.slices_per_step + len(self.step.reissue)
        if version < self.step.index - 1:
            return 0
        return (self._terms.stale_budget - self._stale_samples) // self._terms.slice_size

    def unstarted(self) -> int:
        waiting = len(self.step.reissue) - self._reissued
        return waiting + self._terms.slices_per_step - self._cursor - self._retired_ahead()

    def take(self, piece: Slice, version: int) -> None:
        if self._reissued < len(self.step.reissue):
            self._reissued += 1
        else:
            self._cursor += 1
        if version < self.step.index:
            self._stale_samples += piece.size
            self._stale_groups[piece.group] = self._stale_groups.get(piece.group, 0) + piece.size

    def closed(self) -> StepProgress:
        if self._cursor == self.step.cursor and not self._reissued:
            return self.step
        return replace(
            self.step,
            cursor=self._cursor,
            reissue=self.step.reissue[self._reissued :],
            groups=self._groups_with_stale_marks(),
            stale_samples=self._stale_samples,
        )

    def _groups_with_stale_marks(self) -> tuple[GroupProgress, ...]:
        if not self._stale_groups:
            return self.step.groups
        groups = list(self.step.groups)
        for index, samples in self._stale_groups.items():
            groups[index] = replace(groups[index], stale=groups[index].stale + samples)
        return tuple(groups)

    def _retired_ahead(self) -> int:
        """Slices behind the cursor's that belong to retired groups and will be skipped."""
        if len(self.step.groups) == self._terms.prompts:
            return 0
        positions = range(self._cursor, self._terms.slices_per_step)
        pieces = (slice_at(self._terms, self.step.index, position) for position in positions)
        return sum(self.step.groups[piece.group].retired for piece in pieces)


def hand_out(state: SchedulerState, at_ns: int) -> tuple[SchedulerState, tuple[Generate, ...]]:
    """Gives every idle generator lane a slice, the quickest lane first, as far as slices may start."""
    if not state.idle:
        return state, ()
    picker = SlicePicker(state)
    if state.terms.dispatch == "earliest_finish":
        chosen = leave_for_a_quicker_lane(state, picker.startable, at_ns)
    else:
        chosen = state.idle
    return lease_slices(state, picker, chosen, at_ns)


def lease_slices(
    state: SchedulerState, picker: SlicePicker, lanes: Iterable[int], at_ns: int
) -> tuple[SchedulerState, tuple[Generate, ...]]:
    """Leases the next slices to these lanes, in this order; a lane for which none may start stays idle."""
    changed = list(state.lanes)
    leased: list[Lease] = []
    for index in lanes:
        lane = changed[index]
        piece = picker.take(lane.version)
        if piece is None:
            continue
        lease = Lease(piece, index, state.leases_issued + len(leased), lane.version, at_ns)
        changed[index] = replace(lane, lease=lease)
        leased.append(lease)
    if not leased:
        return state, ()
    busy = {lease.lane for lease in leased}
    state = replace(
        state,
        lanes=tuple(changed),
        idle=tuple(index for index in state.idle if index not in busy),
        steps=picker.steps(),
        leases_issued=state.leases_issued + len(leased),
    )
    return state, tuple(Generate(lease) for lease in leased)
