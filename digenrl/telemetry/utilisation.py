"""How busy every lane and every pool was, and where the bubbles are: pure functions of a trace.

The trainer's cards appear in several rows: the row "trainer", and one row per helper lane. A card is counted
as busy in each of its rows whenever it works, wherever that work is drawn: a helper lane is no bubble while
its card trains, and the trainer is no bubble while its cards help. Where generators and trainer share their
cards, the same holds for every generator lane.

Publishing goes on beside other work and keeps no lane busy. A lane's share is over the time it was there, which is
the whole run unless it joined later or was lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from digenrl.telemetry.trace import GENERATOR_POOL, TRAINER_LANE, LaneInfo, Span, Trace, Work

Intervals: TypeAlias = tuple[tuple[int, int], ...]  # (start_ns, end_ns), sorted, disjoint, none of length 0


@dataclass(frozen=True, slots=True)
class LaneUse:
    """What one lane did with its time; `own`, `elsewhere` less `own`, and `idle` fill the time it was there.

    `own` is work in the lane's own row, `elsewhere` is work of its card that is drawn in another row.
    """

    own: Intervals
    elsewhere: Intervals
    idle: Intervals
    present_ns: int
    busy_share: float


def spans_by_lane(trace: Trace) -> dict[str, tuple[Span, ...]]:
    """Every lane's spans, in the order of their start; a lane that never worked has none."""
    spans: dict[str, list[Span]] = {lane.name: [] for lane in trace.lanes}
    for span in sorted(trace.spans, key=lambda span: (span.start_ns, span.end_ns)):
        assert span.lane in spans, f"span on unknown lane {span.lane!r}; known: {', '.join(spans)}"
        spans[span.lane].append(span)
    return {name: tuple(of_lane) for name, of_lane in spans.items()}


def lane_uses(trace: Trace) -> dict[str, LaneUse]:
    """The use of every lane, by its name, in the order of the trace's lanes."""
    spans = spans_by_lane(trace)
    return {lane.name: _lane_use(lane, trace, spans) for lane in trace.lanes}


def idle_intervals(trace: Trace) -> dict[str, Intervals]:
    """The bubbles of every lane: when its card did nothing."""
    return {name: use.idle for name, use in lane_uses(trace).items()}


def lane_busy_shares(trace: Trace) -> dict[str, float]:
    """The share of its time, 0 to 1, in which each lane worked; 0 for a run of no length."""
    return {name: use.busy_share for name, use in lane_uses(trace).items()}


def pool_busy_shares(trace: Trace) -> dict[str, float]:
    """The share of each pool's lane-seconds spent working; the trainer is one unit, its row "trainer"."""
    uses = lane_uses(trace)
    pools: dict[str, list[str]] = {}
    for lane in trace.lanes:
        pools.setdefault(lane.pool, []).append(lane.name)
    return {pool: pool_share(names, uses) for pool, names in pools.items()}


def pool_share(lane_names: list[str], uses: dict[str, LaneUse]) -> float:
    """The busy share of the pool made of these lanes; see `pool_busy_shares`."""
    unit = [TRAINER_LANE] if TRAINER_LANE in lane_names else lane_names
    present_ns = sum(uses[name].present_ns for name in unit)
    busy_ns = sum(uses[name].busy_share * uses[name].present_ns for name in unit)
    return busy_ns / present_ns if present_ns else 0.0


def _lane_use(lane: LaneInfo, trace: Trace, spans: dict[str, tuple[Span, ...]]) -> LaneUse:
    own = _merged((s for s in spans[lane.name] if s.work is not Work.PUBLISH), trace.end_ns)
    elsewhere = _merged(_work_in_other_rows(lane, trace, spans), trace.end_ns)
    left_ns = trace.end_ns if lane.left_ns is None else lane.left_ns
    idle = _within(_gaps(_merge(own + elsewhere), trace.end_ns), lane.joined_ns, left_ns)
    idle_ns = sum(end_ns - start_ns for start_ns, end_ns in idle)
    present_ns = left_ns - lane.joined_ns
    busy_share = (present_ns - idle_ns) / present_ns if present_ns else 0.0
    return LaneUse(own, elsewhere, idle, present_ns, busy_share)


def _work_in_other_rows(lane: LaneInfo, trace: Trace, spans: dict[str, tuple[Span, ...]]) -> Iterable[Span]:
    """The trainer's row lacks what its cards generate; the rows of its cards lack what the trainer's row shows."""
    trainer = next((other for other in trace.lanes if other.name == TRAINER_LANE), None)
    if trainer is None:
        return []
    cards = [other.name for other in trace.lanes if _is_card_of(trainer, other, trace.shared_cards)]
    if lane == trainer:
        work = Work.GENERATE if trace.shared_cards else Work.HELP
        return [s for name in cards for s in spans[name] if s.work is work]
    return [s for s in spans[TRAINER_LANE] if s.work is not Work.PUBLISH] if lane.name in cards else []


def _is_card_of(trainer: LaneInfo, lane: LaneInfo, shared_cards: bool) -> bool:
    """The trainer's helper lanes are its cards; where cards are shared, so is every generator lane."""
    return lane != trainer and (lane.pool == trainer.pool or (shared_cards and lane.pool == GENERATOR_POOL))


def _merged(spans: Iterable[Span], end_ns: int) -> Intervals:
    return _merge((max(0, s.start_ns), min(s.end_ns, end_ns)) for s in spans)


def _merge(intervals: Iterable[tuple[int, int]]) -> Intervals:
    merged: list[tuple[int, int]] = []
    for start_ns, end_ns in sorted(intervals):
        if start_ns >= end_ns:
            continue
        if merged and start_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_ns))
        else:
            merged.append((start_ns, end_ns))
    return tuple(merged)


def _gaps(busy: Intervals, end_ns: int) -> Intervals:
    edges = [0, *(edge for interval in busy for edge in interval), end_ns]
    return tuple((start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end)


def _within(intervals: Intervals, first_ns: int, last_ns: int) -> Intervals:
    clipped = ((max(start, first_ns), min(end, last_ns)) for start, end in intervals)
    return tuple((start, end) for start, end in clipped if start < end)
