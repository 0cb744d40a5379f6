"""GAP: the order in which a step's slices are served.

`generation` order finishes one group after the other, so that groups complete early and stream to the
trainer; `batch` order takes the first slice of every group, then the second of every group, and so on.
"""

from __future__ import annotations

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


def position_of(terms: Terms, piece: Slice) -> int:
    """Where a slice stands in its step's list; slices of replacement groups stand behind all others."""
    turn = piece.first // terms.slice_size
    if piece.group >= terms.prompts or terms.order == "generation":
        return piece.group * terms.slices_per_group + turn
    return turn * terms.prompts + piece.group


def slices_of_group(terms: Terms, step: int, group: int) -> tuple[Slice, ...]:
    """All slices of one group, in order."""
    size = terms.slice_size
    return tuple(Slice(step, group, first, size) for first in range(0, terms.samples_per_prompt, size))
