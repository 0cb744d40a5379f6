"""Records what every lane does in a run, simulated or live, by observing events and actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from digenrl.records import (
    NO_LANE,
    Action,
    Calibrate,
    Committed,
    Evaluate,
    Event,
    Generate,
    Job,
    Publish,
    Published,
    Result,
    Save,
    Score,
    SendGradients,
    Slice,
    SwitchRole,
    Train,
    Wait,
    WorkerJoined,
    WorkerLost,
    holding_lane,
)
from digenrl.scheduling import SchedulerState
from digenrl.telemetry.trace import (
    GENERATOR_POOL,
    REWARD_POOL,
    TRAINER_LANE,
    TRAINER_POOL,
    TRAINER_WORK,
    LaneInfo,
    Span,
    Trace,
    Work,
    lane_work,
)


@dataclass(slots=True)
class _Publication:
    """One version on its way to some lanes. It has arrived when the last lane that is still present has it."""

    job: Publish
    missing: set[int]
    last_result_ns: int | None = None


class Recorder:
    """An observer that turns jobs and results into spans, and keeps the times that an answer needs.

    Without a `sink`, everything is kept for `trace()`. With one, each span goes to it when it ends, and nothing is
    kept, however long the run. Lanes are present from `start_ns` on. Late and repeated results end no span.
    """

    def __init__(
        self, initial: SchedulerState, *, start_ns: int = 0, sink: Callable[[Span], None] | None = None
    ) -> None:
        self._initial = initial
        self._start_ns = self._now_ns = start_ns
        self._lane_names = [lane.name for lane in initial.lanes]
        self._helpers = {lane.index for lane in initial.lanes if lane.helper and not initial.terms.colocated}
        self._joined_ns: dict[int, int] = {}
        self._left_ns: dict[int, int] = {}
        self._open: dict[int, tuple[Job, int]] = {}  # by id: the job, and the version when it was issued
        self._publications: list[_Publication] = []
        self._sink = sink
        self.spans: list[Span] = []
        self.commit_ends_ns: list[int] = []
        self.help_decisions: list[tuple[int, str]] = []  # (when, "help" or "wait")

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        self._now_ns = max(self._now_ns, event.at_ns)
        self._close(event)
        for action in actions:
            if isinstance(action, Publish):
                self._open_publication(action)
            elif isinstance(action, Job):
                self._open[action.id] = (action, state.committed)
            self._note_help_decision(action, event.at_ns)

    def trace(self) -> Trace:
        """The lanes and the spans so far, ordered by start."""
        lanes = [self._lane_info(index) for index in range(len(self._lane_names))]
        helpers = [lane for lane in lanes if lane.pool == TRAINER_POOL]
        generators = [lane for lane in lanes if lane.pool == GENERATOR_POOL]
        scorers = [
            LaneInfo(f"reward-{index}", REWARD_POOL, self._start_ns)
            for index in range(self._initial.terms.scorers)
        ]
        spans = sorted(self.spans, key=lambda span: (span.start_ns, span.end_ns))
        rows = (*generators, *scorers, LaneInfo(TRAINER_LANE, TRAINER_POOL, self._start_ns), *helpers)
        terms = self._initial.terms
        return Trace(rows, tuple(spans), self._now_ns, terms.colocated, terms.shares_work)

    def _lane_info(self, lane: int) -> LaneInfo:
        pool = TRAINER_POOL if lane in self._helpers else GENERATOR_POOL
        joined_ns = self._joined_ns.get(lane, self._start_ns)
        return LaneInfo(self._lane_names[lane], pool, joined_ns, self._left_ns.get(lane))

    def _note_help_decision(self, action: Action, at_ns: int) -> None:
        if self._sink is not None or self._initial.terms.colocated:
            return
        if isinstance(action, Wait):
            self.help_decisions.append((at_ns, "wait"))
        elif isinstance(action, SwitchRole) and action.role == "generate":
            self.help_decisions.append((at_ns, "help"))

    def _close(self, event: Event) -> None:
        if isinstance(event, Published):
            self._close_publication(event)
        elif isinstance(event, Result):
            job, version = self._open.pop(event.job.id, (None, 0))
            if job is not None:
                self._add_span(job, version, event.at_ns)
            if isinstance(event, Committed) and self._sink is None:
                self.commit_ends_ns.append(event.at_ns)
        elif isinstance(event, WorkerJoined):
            self._joined_ns[len(self._lane_names)] = event.at_ns
            self._lane_names.append(event.offer.name)
        elif isinstance(event, WorkerLost):
            self._close_lost(event)

    def _close_lost(self, event: WorkerLost) -> None:
        """Whatever the lost worker was doing ends now."""
        if event.pool == "generator":
            self._left_ns.setdefault(event.lane, event.at_ns)
        for job, version in list(self._open.values()):
            if self._is_held_by(job, event):
                del self._open[job.id]
                self._add_span(job, version, event.at_ns)
        for publication in tuple(self._publications):
            if publication.last_result_ns is not None:  # the lost lane will not report any more
                self._close_if_arrived(publication)

    def _is_held_by(self, job: Job, lost: WorkerLost) -> bool:
        lane = holding_lane(job)
        if lane is not None:
            if lost.pool == "trainer":
                return lane in self._helpers
            return lost.pool == "generator" and lane == lost.lane
        if isinstance(job, Score):
            return lost.pool == "reward" and job.scorer == lost.lane
        return lost.pool == "trainer" and type(job) in TRAINER_WORK

    def _add_span(self, job: Job, version: int, at_ns: int) -> None:
        end_ns = max(job.issued_ns, at_ns)
        if isinstance(job, Generate):
            work = lane_work(job, job.lane in self._helpers)
            self._keep(_slice_span(self._lane_names[job.lane], work, job, end_ns, job.slice, job.version))
        elif isinstance(job, Evaluate):
            version = job.chunk.version
            lane = self._lane_names[job.lane]
            self._keep(Span(lane, Work.EVALUATE, job.issued_ns, end_ns, version, version=version))
        elif isinstance(job, Calibrate):
            self._keep(Span(self._lane_names[job.lane], Work.CALIBRATE, job.issued_ns, end_ns, job.step))
        elif isinstance(job, Score):
            lane = f"reward-{job.scorer}"
            if isinstance(job.piece, Slice):
                self._keep(_slice_span(lane, Work.SCORE, job, end_ns, job.piece, 0))
            else:
                version = job.piece.version
                self._keep(Span(lane, Work.EVALUATE, job.issued_ns, end_ns, version, version=version))
        elif isinstance(job, Train):
            lane = TRAINER_LANE if job.lane == NO_LANE else self._lane_names[job.lane]
            self._keep(_slice_span(lane, Work.TRAIN, job, end_ns, job.slice, version))
        elif isinstance(job, SendGradients) and end_ns > job.issued_ns:
            lane = self._lane_names[job.lane]
            self._keep(Span(lane, Work.SEND, job.issued_ns, end_ns, job.step, version=version))
        elif type(job) in TRAINER_WORK and end_ns > job.issued_ns:
            step = max(0, job.step - 1) if isinstance(job, Save) else version
            self._keep(Span(TRAINER_LANE, TRAINER_WORK[type(job)], job.issued_ns, end_ns, step, version=version))

    def _open_publication(self, job: Publish) -> None:
        """Publications whose lanes never answered are dropped once two newer versions are published."""
        recent = [each for each in self._publications if each.job.version >= job.version - 1]
        self._publications = [*recent, _Publication(job, set(job.lanes))]

    def _close_publication(self, event: Published) -> None:
        for publication in tuple(self._publications):
            if publication.job.id == event.job.id and not publication.missing.isdisjoint(event.lanes):
                publication.missing -= set(event.lanes)
                publication.last_result_ns = event.at_ns
                self._close_if_arrived(publication)

    def _close_if_arrived(self, publication: _Publication) -> None:
        if not publication.missing <= self._left_ns.keys() or publication.last_result_ns is None:
            return
        self._publications = [each for each in self._publications if each is not publication]
        job, end_ns = publication.job, publication.last_result_ns
        if end_ns > job.issued_ns:
            span = Span(TRAINER_LANE, Work.PUBLISH, job.issued_ns, end_ns, job.version - 1, version=job.version)
            self._keep(span)

    def _keep(self, span: Span) -> None:
        (self.spans.append if self._sink is None else self._sink)(span)


def _slice_span(lane: str, work: Work, job: Job, end_ns: int, piece: Slice, version: int) -> Span:
    return Span(lane, work, job.issued_ns, end_ns, piece.step, piece.group, piece.first, piece.size, version)
