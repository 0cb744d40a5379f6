"""How each lane spent its time in a window of the run, as shares: every kind of work, other rows, and idle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from digenrl.telemetry.trace import TRAINER_LANE, TRAINER_POOL, LaneInfo, Trace, Work
from digenrl.telemetry.utilization import counted_rows, lane_uses, spans_by_lane


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A period of the run, in nanoseconds."""

    start_ns: int
    end_ns: int

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        """How much of an interval lies in the window."""
        return max(0, min(end_ns, self.end_ns) - max(start_ns, self.start_ns))


@dataclass(frozen=True, slots=True)
class LaneShares:
    """Shares of the time a lane was present: `works`, `elsewhere` and `idle` add up to 1, `busy` is 1 - `idle`.

    Publishing runs concurrently with other work and is not part of the sum.
    """

    works: Mapping[Work, float]
    elsewhere: float
    idle: float
    busy: float
    publishing: float


def step_windows(trace: Trace) -> dict[int, TimeWindow]:
    """The window of every step, from commit to commit, in order; the first starts with the run."""
    commit_ends: dict[int, int] = {}
    for span in trace.spans:
        if span.work is Work.COMMIT:
            commit_ends[span.step] = max(span.end_ns, commit_ends.get(span.step, 0))
    windows: dict[int, TimeWindow] = {}
    start_ns = 0
    for step in sorted(commit_ends):
        windows[step] = TimeWindow(start_ns, commit_ends[step])
        start_ns = commit_ends[step]
    return windows


def steady_window(trace: Trace) -> TimeWindow | None:
    """All steps except the first, which fills the pipeline; None if there are no others."""
    windows = list(step_windows(trace).values())
    return TimeWindow(windows[0].end_ns, windows[-1].end_ns) if len(windows) > 1 else None


def lane_shares(trace: Trace, window: TimeWindow) -> dict[str, LaneShares]:
    """The shares of every lane that was present in the window, by name."""
    spans, uses = spans_by_lane(trace), lane_uses(trace)
    shares: dict[str, LaneShares] = {}
    for lane in trace.lanes:
        present_ns = window.overlap_ns(lane.joined_ns, trace.end_ns if lane.left_ns is None else lane.left_ns)
        if not present_ns:
            continue
        worked_ns: dict[Work, int] = {}
        for span in spans[lane.name]:
            inside_ns = window.overlap_ns(span.start_ns, min(span.end_ns, trace.end_ns))
            worked_ns[span.work] = worked_ns.get(span.work, 0) + inside_ns
        publishing_ns = worked_ns.pop(Work.PUBLISH, 0)
        idle_ns = sum(window.overlap_ns(*interval) for interval in uses[lane.name].idle)
        elsewhere_ns = max(0, present_ns - idle_ns - sum(worked_ns.values()))
        shares[lane.name] = LaneShares(
            works={work: ns / present_ns for work, ns in worked_ns.items() if ns},
            elsewhere=elsewhere_ns / present_ns,
            idle=idle_ns / present_ns,
            busy=(present_ns - idle_ns) / present_ns,
            publishing=publishing_ns / present_ns,
        )
    return shares


def without_helper_rows(lanes: Iterable[LaneInfo]) -> list[LaneInfo]:
    """The lanes without the trainer's helper lanes, which show its own cards a second time."""
    known = list(lanes)
    if not any(lane.name == TRAINER_LANE for lane in known):
        return known
    return [lane for lane in known if lane.name == TRAINER_LANE or lane.pool != TRAINER_POOL]


def mean_busy(trace: Trace, lanes: Iterable[LaneInfo], shares: Mapping[str, LaneShares]) -> float | None:
    """The mean busy share of those lanes that have shares, each card once; None if there are none."""
    known = counted_rows(trace, (lane for lane in lanes if lane.name in shares))
    return fmean(shares[lane.name].busy for lane in known) if known else None
