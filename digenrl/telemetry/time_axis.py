"""The time axis of a chart: its end, its ticks, and how times are written."""

from __future__ import annotations

from digenrl.telemetry.trace import Trace
from digenrl.units import NS_PER_SECOND


def horizon_ns(trace: Trace) -> int:
    """The end of the axis: that of the run, or of work that outlasts it (the last publication)."""
    return max([trace.end_ns, *(span.end_ns for span in trace.spans)])


def tick_step_ns(until_ns: int, most_ticks: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... ns that divides [0, until] into at most `most_ticks` parts."""
    assert until_ns >= 0 and most_ticks > 0, f"cannot divide {until_ns} ns into {most_ticks} ticks"
    decade = 1
    while True:
        for step in (decade, 2 * decade, 5 * decade):
            if step * most_ticks >= until_ns:
                return step
        decade *= 10


def ticks_ns(until_ns: int, most_ticks: int) -> tuple[int, ...]:
    """The round times from 0 to at most `until_ns`."""
    return tuple(range(0, until_ns + 1, tick_step_ns(until_ns, most_ticks)))


def seconds_text(time_ns: int) -> str:
    """A time in seconds, exact, without trailing zeros.

    >>> seconds_text(1_700_000_000), seconds_text(20_000_000_000), seconds_text(1)
    ('1.7', '20', '0.000000001')
    """
    whole, rest_ns = divmod(time_ns, NS_PER_SECOND)
    return f"{whole}.{rest_ns:09d}".rstrip("0").rstrip(".")
