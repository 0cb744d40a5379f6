"""Shrinks the faults of a failing world to a few without which it does not fail (delta debugging)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_RUNS = 400


def shrink(count: int, fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """The numbers of faults, out of `count`, that still fail together; leaving out any one of them does not.

    >>> shrink(8, lambda kept: {2, 5} <= set(kept))
    [2, 5]
    """
    kept, size, runs = list(range(count)), max(1, count // 2), 0
    while kept and runs < MOST_RUNS:
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            runs += 1
            if fails(fewer):
                kept = fewer
                break
        else:
            if size == 1:
                break
            size //= 2
    return kept
