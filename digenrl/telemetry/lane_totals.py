"""Who did what: the samples that each lane generated and trained in a window of the run, and its seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from digenrl.telemetry.lane_shares import TimeWindow
from digenrl.telemetry.trace import TRAINER_LANE, TRAINER_POOL, LaneInfo, Span, Trace, Work
from digenrl.telemetry.utilization import Intervals, counted_rows, lane_uses, merged, spans_by_lane
from digenrl.units import NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """What one lane did. Its seconds add up to the time that it was present.

    Samples count when their work ends; those of repeated work count each time.
    """

    name: str
    pool: str
    generated: int
    trained: int
    generating_s: float
    training_s: float
    other_s: float
    idle_s: float


def lane_totals(trace: Trace, window: TimeWindow) -> tuple[LaneTotals, ...]:
    """The totals of every lane that was present in the window.

    The trainer is one unit, with all that its cards do; where they act alone, each of several has its own totals.
    """
    spans, uses = spans_by_lane(trace), lane_uses(trace)
    of_trainer = [lane.name for lane in trace.lanes if lane.pool == TRAINER_POOL]
    counted = counted_rows(trace, trace.lanes)
    alone = sum(lane.pool == TRAINER_POOL for lane in counted) > 1
    totals = []
    for lane in counted:
        is_trainer = lane.pool == TRAINER_POOL and not alone
        name, rows = (TRAINER_LANE, of_trainer) if is_trainer else (lane.name, [lane.name])
        own = [span for row in rows for span in spans[row]]
        present_ns = window.overlap_ns(lane.joined_ns, trace.end_ns if lane.left_ns is None else lane.left_ns)
        if present_ns:
            totals.append(_totals(name, lane, own, uses[lane.name].idle, window, present_ns))
    return tuple(totals)


def _totals(
    name: str, lane: LaneInfo, spans: list[Span], idle: Intervals, window: TimeWindow, present_ns: int
) -> LaneTotals:
    generating = [span for span in spans if span.work in (Work.GENERATE, Work.HELP)]
    training = [span for span in spans if span.work is Work.TRAIN]
    generating_ns = _inside_ns(merged(generating, window.end_ns), window)
    training_ns = _inside_ns(merged(training, window.end_ns), window)
    idle_ns = _inside_ns(idle, window)
    return LaneTotals(
        name=name,
        pool=lane.pool,
        generated=_samples(generating, window),
        trained=_samples(training, window),
        generating_s=generating_ns / NS_PER_SECOND,
        training_s=training_ns / NS_PER_SECOND,
        other_s=(present_ns - idle_ns - generating_ns - training_ns) / NS_PER_SECOND,
        idle_s=idle_ns / NS_PER_SECOND,
    )


def _inside_ns(intervals: Intervals, window: TimeWindow) -> int:
    return sum(window.overlap_ns(*interval) for interval in intervals)


def _samples(spans: Iterable[Span], window: TimeWindow) -> int:
    return sum(span.size for span in spans if window.start_ns < span.end_ns <= window.end_ns)
