"""What is left of a step's list, as a forecast sees it: groups and numbers of slices, no ids."""

from __future__ import annotations

from digenrl.scheduling.order import group_at
from digenrl.scheduling.state import StepProgress
from digenrl.scheduling.terms import Terms

Runs = tuple[tuple[int, int], ...]  # (group, number of slices)


class SliceList:
    """The slices of a step that are still to be handed out: one by one, or as a stretch of the full list."""

    __slots__ = ("_by_group", "_first", "_listed", "_per_group", "_prompts", "length")

    def __init__(self, terms: Terms, first: int, listed: tuple[int, ...] | None = None) -> None:
        self._first, self._listed = first, listed
        self._by_group, self._per_group = terms.order == "generation", terms.slices_per_group
        self._prompts = terms.prompts
        self.length = terms.slices_per_step - first if listed is None else len(listed)

    def position(self, place: int) -> int:
        """Where in the step's whole list a place is; about, where slices wait to be made again."""
        return self._first + place

    def equal_takes(self, place: int, at_once: int, lanes: int, left: int) -> tuple[int, int]:
        """What the next lane gets of the `left` slices from `place` on, and how many of the lanes get as many."""
        if at_once == 1:
            return 1, min(lanes, left)
        in_group = min(left, self._left_in_group(place))
        slices = min(at_once, in_group)
        if slices < at_once:
            return slices, 1
        if self._listed is None and self._per_group % at_once == in_group % at_once == 0:
            in_group = left  # all groups are cut alike
        return slices, min(lanes, in_group // at_once)

    def _left_in_group(self, place: int) -> int:
        if self._listed is not None:
            group, end = self._listed[place], place + 1
            while end < self.length and self._listed[end] == group:
                end += 1
            return end - place
        if not self._by_group:
            return self.length - place
        return self._per_group - (self._first + place) % self._per_group

    def runs(self, position: int, count: int) -> Runs:
        """The groups of `count` slices from `position` on."""
        if self._listed is not None:
            return tuple((group, 1) for group in self._listed[position : position + count])
        at = self._first + position
        if not self._by_group:
            return tuple((place % self._prompts, 1) for place in range(at, at + count))
        whole = self._per_group
        group, offset = divmod(at, whole)
        if offset + count <= whole:
            return ((group, count),)
        last_group, in_last = divmod(at + count, whole)
        head = ((group, whole - offset),)
        tail = ((last_group, in_last),) if in_last else ()
        return (*head, *((between, whole) for between in range(group + 1, last_group)), *tail)


def unstarted_slices(terms: Terms, step: StepProgress) -> SliceList:
    """What is still to be handed out of a step, in order; without something to make again, see `holes_in`."""
    if not step.reissue:
        return SliceList(terms, step.cursor)
    again = tuple(piece.group for piece in step.reissue)
    started = set(step.ahead)
    unstarted = (at for at in range(step.cursor, terms.slices_per_step) if at not in started)
    return SliceList(terms, 0, again + tuple(group_at(terms, at) for at in unstarted))


def holes_in(step: StepProgress) -> list[int]:
    """Places in its `unstarted_slices` that are not to be handed out any more."""
    return [] if step.reissue else [position - step.cursor for position in step.ahead]
