"""What each lane did with its time, as shares that fill it: every kind of work, work in another row, and idle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from digenrl.telemetry.trace import TRAINER_LANE, LaneInfo, Trace, Work
from digenrl.telemetry.utilisation import Intervals, lane_uses, spans_by_lane


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the run, in nanoseconds."""

    start_ns: int
    end_ns: int

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        """How much of an interval lies in the window."""
        return max(0, min(end_ns, self.end_ns) - max(start_ns, self.start_ns))


@dataclass(frozen=True, slots=True)
class LaneShares:
    """Shares of the time a lane was there. `works`, `elsewhere` and `idle` add up to 1.

    Publishing goes on beside other work, so it stands apart.
    """

    works: Mapping[Work, float]
    elsewhere: float
    idle: float
    publishing: float

    @property
    def busy(self) -> float:
        """All that is not idle."""
        return 1.0 - self.idle


def step_windows(trace: Trace) -> dict[int, Window]:
    """From commit to commit: every step's stretch, in the order of the steps; the first starts with the run."""
    commit_ends: dict[int, int] = {}
    for span in trace.spans:
        if span.work is Work.COMMIT:
            commit_ends[span.step] = max(span.end_ns, commit_ends.get(span.step, 0))
    windows: dict[int, Window] = {}
    start_ns = 0
    for step in sorted(commit_ends):
        windows[step] = Window(start_ns, commit_ends[step])
        start_ns = commit_ends[step]
    return windows


def steady_window(trace: Trace) -> Window | None:
    """All steps but the first, which fills the pipeline; None if there are no others."""
    windows = list(step_windows(trace).values())
    return Window(windows[0].end_ns, windows[-1].end_ns) if len(windows) > 1 else None


def shares_of_lanes(trace: Trace, window: Window) -> dict[str, LaneShares]:
    """The shares of every lane that was there within the window, by name."""
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
        idle_ns = _inside_ns(uses[lane.name].idle, window)
        elsewhere_ns = max(0, present_ns - idle_ns - sum(worked_ns.values()))
        shares[lane.name] = LaneShares(
            works={work: ns / present_ns for work, ns in worked_ns.items() if ns},
            elsewhere=elsewhere_ns / present_ns,
            idle=idle_ns / present_ns,
            publishing=publishing_ns / present_ns,
        )
    return shares


def mean_busy(lanes: Iterable[LaneInfo], shares: Mapping[str, LaneShares]) -> float | None:
    """The mean over lanes. The trainer's helper rows show its own cards once more, and count with its row."""
    known = [lane for lane in lanes if lane.name in shares]
    trainer_pools = {lane.pool for lane in known if lane.name == TRAINER_LANE}
    units = [lane for lane in known if lane.name == TRAINER_LANE or lane.pool not in trainer_pools]
    return fmean(shares[lane.name].busy for lane in units) if units else None


def _inside_ns(intervals: Intervals, window: Window) -> int:
    return sum(window.overlap_ns(start_ns, end_ns) for start_ns, end_ns in intervals)
