"""Bars, sparklines and durations in text, with plain characters for terminals that know no others."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_PLAIN_HEIGHTS = "_.-=*#"


def bar(share: float, width: int, plain: bool = False) -> str:
    """A share of 0 to 1 as a bar, `width` columns wide with its blanks.

    >>> bar(0.5, 4), bar(0.5, 4, plain=True)
    ('██  ', '##  ')
    """
    share = min(1.0, max(0.0, share))
    if plain:
        return ("#" * round(share * width)).ljust(width)
    full, eighths = divmod(round(share * width * 8), 8)
    return ("█" * full + (_EIGHTHS[eighths] if eighths else "")).ljust(width)


def sparkline(values: Sequence[float], plain: bool = False) -> str:
    """One character per value, from the lowest of them to the highest; a blank for what is no number.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    heights = _PLAIN_HEIGHTS if plain else _HEIGHTS
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, spread = min(finite), max(finite) - min(finite)
    places = [((value - low) / spread if spread else 0.5) if math.isfinite(value) else None for value in values]
    top = len(heights) - 1
    return "".join(" " if place is None else heights[math.floor(place * top + 0.5)] for place in places)


def duration(seconds: float) -> str:
    """As people say it, two units at most.

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
    """Four digits that count, and a width that stays.

    >>> number(0.51234), number(1234.5), number(float("nan"))
    ('0.5123', '1234', 'nan')
    """
    return f"{value:.4f}" if 0.001 <= abs(value) < 10 or value == 0 else f"{value:.4g}"
