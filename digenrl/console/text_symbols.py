"""Bars, sparklines, durations and numbers as text, in ASCII for terminals that show nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_ASCII_HEIGHTS = "_.-=*#"


def bar(share: float, width: int, ascii_only: bool = False) -> str:
    """A share between 0 and 1 as a bar, padded to `width` columns.

    >>> bar(0.5, 4), bar(0.5, 4, ascii_only=True)
    ('██  ', '##  ')
    """
    share = min(1.0, max(0.0, share))
    if ascii_only:
        return ("#" * round(share * width)).ljust(width)
    full, eighths = divmod(round(share * width * 8), 8)
    return ("█" * full + (_EIGHTHS[eighths] if eighths else "")).ljust(width)


def sparkline(values: Sequence[float], ascii_only: bool = False) -> str:
    """One character per value, scaled from the lowest to the highest; a blank for values that are not finite.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    heights = _ASCII_HEIGHTS if ascii_only else _HEIGHTS
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, spread = min(finite), max(finite) - min(finite)
    places = [((value - low) / spread if spread else 0.5) if math.isfinite(value) else None for value in values]
    top = len(heights) - 1
    return "".join(" " if place is None else heights[math.floor(place * top + 0.5)] for place in places)


def duration(seconds: float) -> str:
    """A duration in words, with at most two units.

    >>> duration(0.84), duration(75), duration(3720), duration(200_000)
    ('0.8 s', '1 min 15 s', '1 h 2 min', '2 d 7 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def number(value: float) -> str:
    """Four significant digits, in a stable width.

    >>> number(0.51234), number(1234.5), number(float("nan"))
    ('0.5123', '1234', 'nan')
    """
    return f"{value:.4f}" if 0.001 <= abs(value) < 10 or value == 0 else f"{value:.4g}"


def skipped_updates(count: float) -> str:
    """How many updates of a step did not change the weights, and why."""
    return f"{count:g} {'update' if count == 1 else 'updates'} skipped: the gradient was not finite"
