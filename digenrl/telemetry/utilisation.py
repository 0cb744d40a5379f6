"""How busy every lane and every pool was, and where the bubbles are: pure functions of a trace.

The trainer's cards appear in several rows: the row "trainer", and one row per helper lane. A card is counted
as busy in each of its rows whenever it works, wherever that work is drawn: a helper lane is no bubble while
its card trains, and the trainer is no bubble while its cards help. Where generators and trainer share their
cards, the same holds for every generator lane.

Publishing goes on beside other work and keeps no lane busy. Evaluating and saving keep a lane busy, though they
bring no step forward: `pool_work_shares` tells them from the rest. A lane's share is over the time it was there,
which is the whole run unless it joined later or was lost.
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
    return {pool: pool_share(names, uses) for pool, names in _pools(trace).items()}


def pool_share(lane_names: list[str], uses: dict[str, LaneUse]) -> float:
    """The busy share of the pool made of these lanes; see `pool_busy_shares`."""
    unit = [TRAINER_LANE] if TRAINER_LANE in lane_names else lane_names
    present_ns = sum(uses[name].present_ns for name in unit)
    busy_ns = sum(uses[name].busy_share * uses[name].present_ns for name in unit)
    return busy_ns / present_ns if present_ns else 0.0


def pool_work_shares(trace: Trace) -> dict[str, dict[Work, float]]:
    """The share of each pool's lane-seconds spent on each kind of work that occurs in its rows.

    The trainer is one unit: what several of its rows do at the same time, as in a round of help, counts once.
    Publishing, beside other work, has its share too.
    """
    uses, spans = lane_uses(trace), spans_by_lane(trace)
    return {pool: _work_shares(names, uses, spans, trace.end_ns) for pool, names in _pools(trace).items()}


def _pools(trace: Trace) -> dict[str, list[str]]:
    pools: dict[str, list[str]] = {}
    for lane in trace.lanes:
        pools.setdefault(lane.pool, []).append(lane.name)
    return pools


def _work_shares(
    names: list[str], uses: dict[str, LaneUse], spans: dict[str, tuple[Span, ...]], end_ns: int
) -> dict[Work, float]:
    is_trainer = TRAINER_LANE in names
    units = [names] if is_trainer else [[name] for name in names]
    present_ns = uses[TRAINER_LANE].present_ns if is_trainer else sum(uses[name].present_ns for name in names)
    shares: dict[Work, float] = {}
    for unit in units:
        of_unit = [span for name in unit for span in spans[name]]
        for work in {span.work for span in of_unit}:
            busy_ns = _length(_merged((span for span in of_unit if span.work is work), end_ns))
            shares[work] = shares.get(work, 0.0) + (busy_ns / present_ns if present_ns else 0.0)
    return {work: shares[work] for work in Work if work in shares}


def _length(intervals: Intervals) -> int:
    return sum(end_ns - start_ns for start_ns, end_ns in intervals)


def _lane_use(lane: LaneInfo, trace: Trace, spans: dict[str, tuple[Span, ...]]) -> LaneUse:
    own = _merged((s for s in spans[lane.name] if s.work is not Work.PUBLISH), trace.end_ns)
    elsewhere = _merged(_work_in_other_rows(lane, trace, spans), trace.end_ns)
    left_ns = trace.end_ns if lane.left_ns is None else lane.left_ns
    idle = _within(_gaps(_merge(own + elsewhere), trace.end_ns), lane.joined_ns, left_ns)
    idle_ns = _length(idle)
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
        works = (Work.GENERATE if trace.shared_cards else Work.HELP, Work.EVALUATE, Work.SAVE)
        return [s for name in cards for s in spans[name] if s.work in works]
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
