"""What is left of a step's list, as a forecast sees it: groups and numbers of slices, without ids."""

from __future__ import annotations

from digenrl.scheduling.order import group_at
from digenrl.scheduling.state import StepProgress
from digenrl.scheduling.terms import Terms

Runs = tuple[tuple[int, int], ...]  # (group, number of slices)


class SliceList:
    """The unstarted slices of a step: the rest of its list from `first` on, or the groups in `listed`."""

    __slots__ = ("_by_group", "_listed", "_per_group", "_prompts", "first", "length")

    def __init__(self, terms: Terms, first: int, listed: tuple[int, ...] | None = None) -> None:
        self.first = first  # of place 0 in the step's whole list; approximate if slices are reissued
        self._listed = listed
        self._by_group, self._per_group = terms.order == "generation", terms.slices_per_group
        self._prompts = terms.prompts
        self.length = terms.slices_per_step - first if listed is None else len(listed)

    def equal_takes(self, place: int, at_once: int, lanes: int, left: int) -> tuple[int, int]:
        """How many of the `left` slices from `place` on the next lane takes, and how many lanes take as many."""
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
        return self._per_group - (self.first + place) % self._per_group

    def runs(self, place: int, count: int) -> Runs:
        """The groups of `count` slices from `place` on."""
        if self._listed is not None:
            return tuple((group, 1) for group in self._listed[place : place + count])
        at = self.first + place
        if not self._by_group:
            return tuple((position % self._prompts, 1) for position in range(at, at + count))
        whole = self._per_group
        group, offset = divmod(at, whole)
        if offset + count <= whole:
            return ((group, count),)
        last_group, in_last = divmod(at + count, whole)
        runs = [(between, whole) for between in range(group, last_group)]
        runs[0] = (group, whole - offset)
        if in_last:
            runs.append((last_group, in_last))
        return tuple(runs)


def unstarted_slices(terms: Terms, step: StepProgress) -> SliceList:
    """The slices of a step that are to be handed out, in order, apart from `started_places`."""
    if not step.reissue:
        return SliceList(terms, step.cursor)
    again = tuple(piece.group for piece in step.reissue)
    started = set(step.ahead)
    unstarted = (at for at in range(step.cursor, terms.slices_per_step) if at not in started)
    return SliceList(terms, 0, again + tuple(group_at(terms, at) for at in unstarted))


def started_places(step: StepProgress) -> list[int]:
    """Places in its `unstarted_slices` that are not to be handed out any more."""
    return [] if step.reissue else [position - step.cursor for position in step.ahead]
