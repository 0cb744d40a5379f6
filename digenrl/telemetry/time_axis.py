"""The time axis of a picture: how far it reaches, its round ticks, and how times are written."""

from __future__ import annotations

from digenrl.telemetry.trace import Trace

_NS_PER_S = 1_000_000_000


def horizon_ns(trace: Trace) -> int:
    """Where the axis ends: the end of the run, or of work that outlives it (the last publication)."""
    return max([trace.end_ns, *(span.end_ns for span in trace.spans)])


def tick_step_ns(until_ns: int, most_ticks: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... ns that cuts [0, until] into at most `most_ticks` parts."""
    assert until_ns >= 0 and most_ticks > 0, f"no axis of {until_ns} ns with {most_ticks} ticks"
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
    """A time in seconds, exact, without needless zeros.

    >>> seconds_text(1_700_000_000), seconds_text(20_000_000_000), seconds_text(1)
    ('1.7', '20', '0.000000001')
    """
    whole, rest_ns = divmod(time_ns, _NS_PER_S)
    return f"{whole}.{rest_ns:09d}".rstrip("0").rstrip(".")
