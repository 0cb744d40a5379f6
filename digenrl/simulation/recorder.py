"""Watches a simulated run from outside and writes down what every lane did."""

from __future__ import annotations

from collections.abc import Sequence

from digenrl.records import (
    Action,
    Commit,
    Committed,
    Event,
    Generate,
    Help,
    HelpersReady,
    Lease,
    Publish,
    Published,
    Return,
    SamplesScored,
    Score,
    ScoreFailed,
    Slice,
    SliceDone,
    SliceFailed,
    Train,
    Trained,
    TrainerReturned,
    Wait,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import SchedulerState
from digenrl.telemetry.trace import TRAINER_LANE, LaneInfo, Span, Trace, Work


class Recorder:
    """An observer that turns events and actions into a trace, and keeps the times that an answer needs."""

    def __init__(self, opening: SchedulerState) -> None:
        self._opening = opening
        self._lane_names = [lane.name for lane in opening.lanes]
        self._helpers = {lane.index for lane in opening.lanes if lane.helper and not opening.terms.colocated}
        self._joined_ns: dict[int, int] = {}
        self._left_ns: dict[int, int] = {}
        self._now_ns = 0
        self._trainer_since = 0
        self._leases: dict[int, Lease] = {}
        self._scoring: dict[int, int] = {}
        self._publishing: dict[int, int] = {}
        self._version = 0
        self.spans: list[Span] = []
        self.commit_ends_ns: list[int] = []
        self.help_decisions: list[tuple[int, str]] = []

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Closes the span that the event ends, and opens those that the actions begin."""
        self._now_ns = event.at_ns
        self._close(event)
        self._version = state.committed
        for action in actions:
            self._open(action)

    def trace(self) -> Trace:
        """Everything so far, in the order in which the work started."""
        terms = self._opening.terms
        lanes = [self._lane_info(index) for index in range(len(self._lane_names))]
        helpers = [lane for lane in lanes if lane.pool == "trainer"]
        generators = [lane for lane in lanes if lane.pool == "generator"]
        scorers = [LaneInfo(f"reward-{index}", "reward") for index in range(terms.scorers)]
        spans = sorted(self.spans, key=lambda span: (span.start_ns, span.end_ns))
        rows = (*generators, *scorers, LaneInfo(TRAINER_LANE, "trainer"), *helpers)
        return Trace(rows, tuple(spans), self._now_ns, shared_cards=terms.colocated)

    def _lane_info(self, lane: int) -> LaneInfo:
        pool = "trainer" if lane in self._helpers else "generator"
        return LaneInfo(self._lane_names[lane], pool, self._joined_ns.get(lane, 0), self._left_ns.get(lane))

    def _open(self, action: Action) -> None:
        if isinstance(action, Generate):
            self._leases[action.lease.lane] = action.lease
        elif isinstance(action, Score):
            self._scoring[action.scorer] = self._now_ns
        elif isinstance(action, Publish):
            self._publishing[action.version] = self._now_ns
        elif isinstance(action, Train | Commit | Return):
            self._trainer_since = self._now_ns
        elif isinstance(action, Help):
            self._trainer_since = self._now_ns
            if not self._opening.terms.colocated:
                self.help_decisions.append((self._now_ns, "help"))
        elif isinstance(action, Wait):
            self.help_decisions.append((self._now_ns, "wait"))

    def _close(self, event: Event) -> None:
        if isinstance(event, SliceDone | SliceFailed):
            self._close_slice(event.lease)
        elif isinstance(event, SamplesScored | ScoreFailed):
            if event.scorer >= 0:
                self._add(f"reward-{event.scorer}", Work.SCORE, self._scoring[event.scorer], event.slice)
        elif isinstance(event, Trained):
            self._close_training(event)
        elif isinstance(event, Committed):
            self._add_unit(Work.COMMIT, event.step)
            self.commit_ends_ns.append(event.at_ns)
        elif isinstance(event, HelpersReady | TrainerReturned):
            self._add_unit(Work.SWITCH, self._version)
        elif isinstance(event, Published):
            self._close_publication(event)
        elif isinstance(event, WorkerJoined):
            self._joined_ns[len(self._lane_names)] = event.at_ns
            self._lane_names.append(event.offer.name)
        elif isinstance(event, WorkerLost):
            self._close_lane(event.lane)

    def _close_lane(self, lane: int) -> None:
        self._left_ns.setdefault(lane, self._now_ns)
        if lane in self._leases:
            self._close_slice(self._leases[lane])

    def _close_slice(self, lease: Lease) -> None:
        if self._leases.get(lease.lane) != lease:
            return  # a late answer; the lane's time ended when it was lost
        del self._leases[lease.lane]
        work = Work.HELP if lease.lane in self._helpers else Work.GENERATE
        self._add(self._lane_names[lease.lane], work, lease.started_ns, lease.slice, lease.version)

    def _close_training(self, event: Trained) -> None:
        """One span per group; several trained in one go share its time evenly."""
        start, count = self._trainer_since, len(event.slices)
        for index, piece in enumerate(event.slices):
            begin = start + (event.at_ns - start) * index // count
            end = start + (event.at_ns - start) * (index + 1) // count
            self.spans.append(
                Span(
                    TRAINER_LANE,
                    Work.TRAIN,
                    begin,
                    end,
                    piece.step,
                    piece.group,
                    piece.first,
                    piece.size,
                    self._version,
                )
            )

    def _close_publication(self, event: Published) -> None:
        start = self._publishing.get(event.version, event.at_ns)
        if event.at_ns > start:
            self.spans.append(
                Span(TRAINER_LANE, Work.PUBLISH, start, event.at_ns, event.version - 1, version=event.version)
            )

    def _add(self, lane: str, work: Work, start_ns: int, piece: Slice, version: int = 0) -> None:
        self.spans.append(
            Span(lane, work, start_ns, self._now_ns, piece.step, piece.group, piece.first, piece.size, version)
        )

    def _add_unit(self, work: Work, step: int) -> None:
        if self._now_ns > self._trainer_since:
            span = Span(TRAINER_LANE, work, self._trainer_since, self._now_ns, step, version=self._version)
            self.spans.append(span)
