"""How many of several lanes do each kind of work over time, stacked for an area chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from digenrl.telemetry.trace import Span, Work


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of work: (time, number of lanes that do it or the work of a lower layer from then on).

    There is an entry per change, and the last has 0 lanes.
    """

    work: Work
    levels: tuple[tuple[int, int], ...]


def stacked_work(spans: Iterable[Span]) -> tuple[Layer, ...]:
    """A layer per kind of work that occurs, from the lowest; publishing keeps no lane busy and has none."""
    known = [span for span in spans if span.work is not Work.PUBLISH]
    works = [work for work in Work if any(span.work is work for span in known)]
    return tuple(
        Layer(work, _levels([span for span in known if span.work in works[: place + 1]]))
        for place, work in enumerate(works)
    )


def _levels(spans: Sequence[Span]) -> tuple[tuple[int, int], ...]:
    change_at: dict[int, int] = {}
    for span in spans:
        for time_ns, change in ((span.start_ns, 1), (span.end_ns, -1)):
            change_at[time_ns] = change_at.get(time_ns, 0) + change
    lanes, levels = 0, []
    for time_ns in sorted(change_at):
        lanes += change_at[time_ns]
        levels.append((time_ns, lanes))
    return tuple(levels)
