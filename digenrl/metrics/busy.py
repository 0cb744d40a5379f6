"""How busy every lane was in each step of a live run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from digenrl.scheduling import SchedulerState
from digenrl.telemetry.lane_shares import TimeWindow, lane_shares, mean_busy
from digenrl.telemetry.trace import (
    GENERATOR_POOL,
    POOLS,
    REWARD_POOL,
    TRAINER_LANE,
    TRAINER_POOL,
    LaneInfo,
    Span,
    Trace,
    Work,
)

MOST_LANES = 32  # above, there is one value per pool: every lane that joins would add a curve


class BusyMeter:
    """Computes busy shares for consecutive windows of time. It keeps the spans of the current window only."""

    def __init__(self, initial: SchedulerState, start_ns: int = 0) -> None:
        self._shared_cards = initial.terms.colocated
        self._window_start_ns = start_ns
        self._spans: list[Span] = []
        present = {lane.name: lane.helper and not self._shared_cards for lane in initial.present_lanes}
        pools = {name: TRAINER_POOL if helps else GENERATOR_POOL for name, helps in present.items()}
        pools |= {f"reward-{index}": REWARD_POOL for index in range(initial.terms.scorers)}
        pools[TRAINER_LANE] = TRAINER_POOL
        self._lanes = {name: LaneInfo(name, pool, start_ns) for name, pool in pools.items()}

    def add(self, span: Span) -> None:
        if span.work is not Work.PUBLISH and span.lane in self._lanes:
            self._spans.append(span)

    def joined(self, lane: str, at_ns: int) -> None:
        """A generator lane joined."""
        self._lanes[lane] = LaneInfo(lane, GENERATOR_POOL, at_ns)

    def left(self, lane: str, at_ns: int) -> None:
        """A lane was lost; a second report of it is ignored."""
        if lane in self._lanes and self._lanes[lane].left_ns is None:
            self._lanes[lane] = replace(self._lanes[lane], left_ns=at_ns)

    def next_window(self, now_ns: int, open_spans: Iterable[Span]) -> dict[str, float]:
        """The busy shares from the start of the window to now; then starts the next window.

        They are by lane or, of more than MOST_LANES lanes, by pool.

        `open_spans` is work that has not ended yet, with `now_ns` as its end.
        """
        for span in open_spans:
            self.add(span)
        trace = Trace(tuple(self._lanes.values()), tuple(self._spans), now_ns, self._shared_cards)
        shares = lane_shares(trace, TimeWindow(self._window_start_ns, now_ns))
        self._lanes = {name: lane for name, lane in self._lanes.items() if lane.left_ns is None}
        self._window_start_ns, self._spans = now_ns, []
        if len(shares) <= MOST_LANES:
            return {name: share.busy for name, share in shares.items()}
        by_pool = {
            pool: mean_busy(trace, [lane for lane in trace.lanes if lane.pool == pool], shares) for pool in POOLS
        }
        return {pool: share for pool, share in by_pool.items() if share is not None}
