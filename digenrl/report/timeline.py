"""The data of the timeline, packed: a long run has millions of spans, and the page must still load fast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from digenrl.run_folder.reading import RunRecord
from digenrl.telemetry.lane_shares import TimeWindow, step_windows
from digenrl.telemetry.styles import LEGEND_ORDER, WorkStyle, style_of
from digenrl.telemetry.time_axis import horizon_ns
from digenrl.telemetry.trace import Span, Trace, Work
from digenrl.telemetry.utilization import Intervals, counted_rows, lane_uses, spans_by_lane

MOST_SPANS = 100_000  # about 5 MB of the page
_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class SpanKind:
    """A kind of work and its style."""

    work: Work
    style: WorkStyle


def kinds_in(trace: Trace) -> tuple[SpanKind, ...]:
    """The kinds that occur, in the order of legends."""
    kinds = {SpanKind(span.work, style_of(span)) for span in trace.spans}
    return tuple(sorted(kinds, key=lambda kind: LEGEND_ORDER.index(kind.style)))


def timeline(run: RunRecord) -> dict[str, Any]:
    """Lanes, kinds and steps for the page; times are whole microseconds. Of a long run, the last steps.

    A lane's `spans` is a flat list with eight numbers per span: start minus the previous start, duration, kind,
    step, group, first, size, version. `idle` and `elsewhere` have the first two per interval. Of the rows that
    show the same card, one is `counted` in means.
    """
    kinds, windows = kinds_in(run.trace), shown_steps(run.trace)
    start_ns = windows[min(windows)].start_ns if windows else 0
    index = {kind: number for number, kind in enumerate(kinds)}
    spans, uses = spans_by_lane(run.trace), lane_uses(run.trace)
    counted = {lane.name for lane in counted_rows(run.trace, run.trace.lanes)}
    devices = {lane.name: lane.device for lane in run.info.lanes}
    return {
        "start": start_ns // _NS_PER_US,
        "end": horizon_ns(run.trace) // _NS_PER_US,
        "kinds": [_kind_entry(kind) for kind in kinds],
        "steps": [
            [step, window.start_ns // _NS_PER_US, window.end_ns // _NS_PER_US] for step, window in windows.items()
        ],
        "lanes": [
            {
                "name": lane.name,
                "pool": lane.pool,
                "device": devices[lane.name],
                "busy": round(uses[lane.name].busy_share, 4),
                "counted": lane.name in counted,
                "spans": pack_spans((span for span in spans[lane.name] if span.end_ns > start_ns), index),
                "idle": pack_intervals(_after(start_ns, uses[lane.name].idle)),
                "elsewhere": pack_intervals(_after(start_ns, uses[lane.name].elsewhere)),
            }
            for lane in run.trace.lanes
        ],
    }


def shown_steps(trace: Trace) -> dict[int, TimeWindow]:
    """The windows of the steps that the page shows: as many of the last as have `MOST_SPANS`, and at least one."""
    windows = step_windows(trace)
    if len(trace.spans) <= MOST_SPANS or not windows:
        return windows
    earliest_ns = sorted(span.start_ns for span in trace.spans)[-MOST_SPANS]
    last = max(windows)
    return {step: window for step, window in windows.items() if window.start_ns >= earliest_ns or step == last}


def _after(start_ns: int, intervals: Intervals) -> Intervals:
    return tuple(interval for interval in intervals if interval[1] > start_ns)


def pack_spans(spans: Iterable[Span], index: dict[SpanKind, int]) -> list[int]:
    """Spans, ordered by start, as one flat list; see `timeline`."""
    packed: list[int] = []
    previous_us = 0
    for span in spans:
        # Both ends are rounded down, so that adjacent spans stay adjacent.
        start_us, end_us = span.start_ns // _NS_PER_US, span.end_ns // _NS_PER_US
        kind = index[SpanKind(span.work, style_of(span))]
        packed += [start_us - previous_us, end_us - start_us, kind]
        packed += [span.step, span.group, span.first, span.size, span.version]
        previous_us = start_us
    return packed


def pack_intervals(intervals: Intervals) -> list[int]:
    """Intervals, in order, as one flat list; see `timeline`."""
    packed: list[int] = []
    previous_us = 0
    for start_ns, end_ns in intervals:
        start_us, end_us = start_ns // _NS_PER_US, end_ns // _NS_PER_US
        packed += [start_us - previous_us, end_us - start_us]
        previous_us = start_us
    return packed


def _kind_entry(kind: SpanKind) -> dict[str, Any]:
    style = kind.style
    return {
        "work": kind.work.value,
        "label": style.label,
        "fill": style.fill,
        "ink": style.ink,
        "stale": style.stale,
        "helped": kind.work is Work.HELP,
        "concurrent": kind.work is Work.PUBLISH,
    }
