"""GAP: the order in which a step's slices are served.

`generation` order finishes one group after the other, so that groups complete early and stream to the
trainer; `batch` order takes the first slice of every group, then the second of every group, and so on.
"""

from __future__ import annotations

from collections.abc import Callable

from digenrl.records import Slice
from digenrl.scheduling.terms import Terms


def group_at(terms: Terms, position: int) -> int:
    """The group of the slice at this position of a step's list."""
    if terms.order == "generation":
        return position // terms.slices_per_group
    return position % terms.prompts


def slice_at(terms: Terms, step: int, position: int) -> Slice:
    """The slice at this position of a step's list.

    >>> slice_at(Terms(steps=1, prompts=2, samples_per_prompt=4, slice_size=2), step=0, position=1)
    Slice(step=0, group=0, first=2, size=2)
    """
    if terms.order == "generation":
        group, turn = divmod(position, terms.slices_per_group)
    else:
        turn, group = divmod(position, terms.prompts)
    return Slice(step, group, turn * terms.slice_size, terms.slice_size)


def positions(terms: Terms) -> Callable[[Slice], int]:
    """A function that gives the position of a slice, or of the first slice of a piece, in its step's list.

    Slices of replacement groups come after all others.
    """
    size, prompts, per_group = terms.slice_size, terms.prompts, terms.slices_per_group
    in_turns = prompts if terms.order == "batch" else 0  # groups that take turns; replacements do not

    def position(piece: Slice) -> int:
        if piece.group < in_turns:
            return piece.first // size * prompts + piece.group
        return piece.group * per_group + piece.first // size

    return position


def positions_of_group(terms: Terms, group: int) -> range:
    """The positions of a group's slices in the step's list; not for replacements."""
    if terms.order == "generation":
        return range(group * terms.slices_per_group, (group + 1) * terms.slices_per_group)
    return range(group, terms.slices_per_step, terms.prompts)


def slices_in(terms: Terms, piece: Slice) -> tuple[Slice, ...]:
    """The slices of a piece, in order."""
    size, end = terms.slice_size, piece.first + piece.size
    return tuple(Slice(piece.step, piece.group, first, size) for first in range(piece.first, end, size))


def slices_of_group(terms: Terms, step: int, group: int) -> tuple[Slice, ...]:
    """All slices of one group, in order."""
    return slices_in(terms, Slice(step, group, 0, terms.samples_per_prompt))
