"""When each lane of a trace worked and when it was idle: pure functions of a trace.

The trainer's cards appear in several rows: the row "trainer", and one row per helper lane. A card counts as busy
in each of its rows whenever it works, whichever row shows that work: a helper lane is not idle while its card
trains, and the trainer is not idle while its cards help. Where generators and trainer share their cards, the same
holds for every generator lane. Where every card acts alone, the row "trainer" is busy while any of its cards is;
the trainer's share is then the mean of its cards' rows.

Publishing runs concurrently with other work and keeps no lane busy; evaluating and saving do. Shares are relative
to the time a lane was present, which is the whole run unless it joined later or was lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from digenrl.telemetry.trace import GENERATOR_POOL, TRAINER_LANE, TRAINER_POOL, LaneInfo, Span, Trace, Work

Intervals: TypeAlias = tuple[tuple[int, int], ...]  # (start_ns, end_ns), sorted, disjoint, none of length 0


@dataclass(frozen=True, slots=True)
class LaneUse:
    """How one lane spent its time; `own`, `elsewhere` without `own`, and `idle` fill the time it was present.

    `own` is work in the lane's own row, `elsewhere` is work of its card that another row shows.
    """

    own: Intervals
    elsewhere: Intervals
    idle: Intervals
    present_ns: int
    busy_share: float


def spans_by_lane(trace: Trace) -> dict[str, tuple[Span, ...]]:
    """Every lane's spans, ordered by start; a lane that never worked has none."""
    spans: dict[str, list[Span]] = {lane.name: [] for lane in trace.lanes}
    for span in sorted(trace.spans, key=lambda span: (span.start_ns, span.end_ns)):
        assert span.lane in spans, f"span on unknown lane {span.lane!r}; known: {', '.join(spans)}"
        spans[span.lane].append(span)
    return {name: tuple(of_lane) for name, of_lane in spans.items()}


def lane_uses(trace: Trace) -> dict[str, LaneUse]:
    """The use of every lane by name, in the order of the trace's lanes."""
    spans, cards = spans_by_lane(trace), _trainer_cards(trace)
    return {lane.name: _lane_use(lane, trace, spans, cards) for lane in trace.lanes}


def counted_rows(trace: Trace, lanes: Iterable[LaneInfo]) -> list[LaneInfo]:
    """Those of these lanes that count in sums and means, so that each card counts once.

    The trainer is one unit, its row "trainer". Where every card acts alone, its helper lanes count instead.
    """
    known = list(lanes)
    helpers = [lane.name for lane in known if lane.pool == TRAINER_POOL and lane.name != TRAINER_LANE]
    if not helpers or all(lane.name != TRAINER_LANE for lane in known):
        return known
    repeated = {TRAINER_LANE} if trace.shares_work else set(helpers)
    return [lane for lane in known if lane.name not in repeated]


def pool_share(trace: Trace, pool: str, uses: dict[str, LaneUse]) -> float:
    """The share of a pool's lane-seconds spent working; every card counts once."""
    counted = [uses[lane.name] for lane in counted_rows(trace, trace.lanes) if lane.pool == pool]
    present_ns = sum(use.present_ns for use in counted)
    busy_ns = sum(use.busy_share * use.present_ns for use in counted)
    return busy_ns / present_ns if present_ns else 0.0


def _lane_use(
    lane: LaneInfo, trace: Trace, spans: dict[str, tuple[Span, ...]], trainer_cards: frozenset[str]
) -> LaneUse:
    own = merged((s for s in spans[lane.name] if s.work is not Work.PUBLISH), trace.end_ns)
    elsewhere = merged(_work_in_other_rows(lane, trace, spans, trainer_cards), trace.end_ns)
    left_ns = trace.end_ns if lane.left_ns is None else lane.left_ns
    idle = _within(_gaps(_merge(own + elsewhere), trace.end_ns), lane.joined_ns, left_ns)
    idle_ns = sum(end_ns - start_ns for start_ns, end_ns in idle)
    present_ns = left_ns - lane.joined_ns
    busy_share = (present_ns - idle_ns) / present_ns if present_ns else 0.0
    return LaneUse(own, elsewhere, idle, present_ns, busy_share)


def _trainer_cards(trace: Trace) -> frozenset[str]:
    """The other rows of the trainer's cards: its helper lanes, and generator lanes where cards are shared."""
    pools = {TRAINER_POOL, GENERATOR_POOL} if trace.shared_cards else {TRAINER_POOL}
    names = {lane.name for lane in trace.lanes}
    cards = {lane.name for lane in trace.lanes if lane.pool in pools and lane.name != TRAINER_LANE}
    return frozenset(cards if TRAINER_LANE in names else ())


def _work_in_other_rows(
    lane: LaneInfo, trace: Trace, spans: dict[str, tuple[Span, ...]], trainer_cards: frozenset[str]
) -> Iterable[Span]:
    """The row "trainer" does not show what its cards do alone; their rows do not show what the trainer does."""
    if lane.name == TRAINER_LANE:
        generating = Work.GENERATE if trace.shared_cards else Work.HELP
        works = (generating, Work.TRAIN, Work.EVALUATE, Work.SAVE)
        return [s for name in trainer_cards for s in spans[name] if s.work in works]
    if lane.name in trainer_cards:
        return [s for s in spans[TRAINER_LANE] if s.work is not Work.PUBLISH]
    return []


def merged(spans: Iterable[Span], end_ns: int) -> Intervals:
    """When any of the spans lasts, between 0 and `end_ns`."""
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
