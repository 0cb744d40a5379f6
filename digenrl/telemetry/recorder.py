"""Records what every lane does in a run, simulated or live, by observing events and actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from digenrl.telemetry.trace import (
    GENERATOR_POOL,
    REWARD_POOL,
    TRAINER_LANE,
    TRAINER_POOL,
    LaneInfo,
    Span,
    Trace,
    Work,
)


@dataclass(slots=True)
class _Publication:
    """One version being sent to some lanes; it ends when all of them that are still present have it."""

    version: int
    started_ns: int
    missing: set[int]
    last_answer_ns: int | None = field(default=None)


class Recorder:
    """An observer that turns events and actions into spans, and keeps commit times and help decisions.

    Without a `sink` everything is kept, for `trace()`. With one, each span goes to it when it ends, and each help
    decision (time, "help" or "wait") to `on_help_decision`; nothing is kept, so memory stays constant. Lanes are
    present from `start_ns` on. Late and repeated answers end no span, and no span ends before it starts.
    """

    def __init__(
        self,
        initial: SchedulerState,
        *,
        start_ns: int = 0,
        sink: Callable[[Span], None] | None = None,
        on_help_decision: Callable[[int, str], None] | None = None,
    ) -> None:
        self._initial = initial
        self._start_ns = self._now_ns = self._trainer_since = start_ns
        self._lane_names = [lane.name for lane in initial.lanes]
        self._helpers = {lane.index for lane in initial.lanes if lane.helper and not initial.terms.colocated}
        self._joined_ns: dict[int, int] = {}
        self._left_ns: dict[int, int] = {}
        self._leases: dict[int, Lease] = {}
        self._scoring: dict[int, tuple[Slice, int]] = {}
        self._publications: list[_Publication] = []
        self._version = initial.committed
        self._sink, self._on_help_decision = sink, on_help_decision
        self.spans: list[Span] = []
        self.commit_ends_ns: list[int] = []
        self.help_decisions: list[tuple[int, str]] = []

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        self._now_ns = max(self._now_ns, event.at_ns)
        self._close(event)
        self._version = state.committed
        for action in actions:
            self._open(action, event.at_ns)

    def add_span(self, span: Span) -> None:
        """Adds work that no action started: an evaluation, a checkpoint."""
        known = (*self._lane_names, TRAINER_LANE, *self._scorer_names())
        assert span.lane in known, f"span on unknown lane {span.lane!r}; known: {', '.join(known)}"
        self._now_ns = max(self._now_ns, span.end_ns)
        self._keep(span)

    def trace(self) -> Trace:
        """The lanes and the spans so far, ordered by start."""
        lanes = [self._lane_info(index) for index in range(len(self._lane_names))]
        helpers = [lane for lane in lanes if lane.pool == TRAINER_POOL]
        generators = [lane for lane in lanes if lane.pool == GENERATOR_POOL]
        scorers = [LaneInfo(name, REWARD_POOL, self._start_ns) for name in self._scorer_names()]
        spans = sorted(self.spans, key=lambda span: (span.start_ns, span.end_ns))
        rows = (*generators, *scorers, LaneInfo(TRAINER_LANE, TRAINER_POOL, self._start_ns), *helpers)
        return Trace(rows, tuple(spans), self._now_ns, shared_cards=self._initial.terms.colocated)

    def _scorer_names(self) -> list[str]:
        return [f"reward-{index}" for index in range(self._initial.terms.scorers)]

    def _lane_info(self, lane: int) -> LaneInfo:
        pool = TRAINER_POOL if lane in self._helpers else GENERATOR_POOL
        joined_ns = self._joined_ns.get(lane, self._start_ns)
        return LaneInfo(self._lane_names[lane], pool, joined_ns, self._left_ns.get(lane))

    # --- Start of work -------------------------------------------------------------------------------------------

    def _open(self, action: Action, at_ns: int) -> None:
        if isinstance(action, Generate):
            self._leases[action.lease.lane] = action.lease
        elif isinstance(action, Score):
            if action.scorer >= 0:  # an instant score has no lane
                self._scoring[action.scorer] = (action.slice, at_ns)
        elif isinstance(action, Publish):
            self._open_publication(action, at_ns)
        elif isinstance(action, Train | Commit | Return):
            self._trainer_since = at_ns
        elif isinstance(action, Help):
            self._trainer_since = at_ns
            if not self._initial.terms.colocated:
                self._decided(at_ns, "help")
        elif isinstance(action, Wait):
            self._decided(at_ns, "wait")

    def _decided(self, at_ns: int, choice: str) -> None:
        if self._on_help_decision is not None:
            self._on_help_decision(at_ns, choice)
        if self._sink is None:
            self.help_decisions.append((at_ns, choice))

    def _open_publication(self, action: Publish, at_ns: int) -> None:
        """Publications whose lanes never answered are dropped once two newer versions are published."""
        recent = [each for each in self._publications if each.version >= action.version - 1]
        self._publications = [*recent, _Publication(action.version, at_ns, set(action.lanes))]

    # --- End of work ---------------------------------------------------------------------------------------------

    def _close(self, event: Event) -> None:
        if isinstance(event, SliceDone | SliceFailed):
            self._close_slice(event.lease, event.at_ns)
        elif isinstance(event, SamplesScored | ScoreFailed):
            self._close_scoring(event.scorer, event.slice, event.at_ns)
        elif isinstance(event, Trained):
            self._close_training(event)
        elif isinstance(event, Committed):
            self._close_trainer_work(Work.COMMIT, event.step, event.at_ns)
            if self._sink is None:
                self.commit_ends_ns.append(event.at_ns)
        elif isinstance(event, HelpersReady | TrainerReturned):
            self._close_trainer_work(Work.SWITCH, self._version, event.at_ns)
        elif isinstance(event, Published):
            self._close_publication(event)
        elif isinstance(event, WorkerJoined):
            self._joined_ns[len(self._lane_names)] = event.at_ns
            self._lane_names.append(event.offer.name)
        elif isinstance(event, WorkerLost):
            self._close_lane(event.lane, event.at_ns)

    def _close_lane(self, lane: int, at_ns: int) -> None:
        self._left_ns.setdefault(lane, at_ns)
        if lane in self._leases:
            self._close_slice(self._leases[lane], at_ns)
        for publication in tuple(self._publications):
            # A driver that reports lane by lane will not report this lane any more.
            if publication.last_answer_ns is not None:
                self._close_if_arrived(publication)

    def _close_slice(self, lease: Lease, at_ns: int) -> None:
        if self._leases.get(lease.lane) != lease:
            return  # a late answer; the span ended when the lane was lost
        del self._leases[lease.lane]
        work = Work.HELP if lease.lane in self._helpers else Work.GENERATE
        self._add(self._lane_names[lease.lane], work, lease.started_ns, at_ns, lease.slice, lease.version)

    def _close_scoring(self, scorer: int, piece: Slice, at_ns: int) -> None:
        held, start_ns = self._scoring.get(scorer, (None, 0))
        if held == piece:
            del self._scoring[scorer]
            self._add(f"reward-{scorer}", Work.SCORE, start_ns, at_ns, piece)

    def _close_training(self, event: Trained) -> None:
        """One span per group; groups trained together share the time evenly."""
        start, count = self._trainer_since, len(event.slices)
        total = max(0, event.at_ns - start)
        for index, piece in enumerate(event.slices):
            begin, end = start + total * index // count, start + total * (index + 1) // count
            self._add(TRAINER_LANE, Work.TRAIN, begin, end, piece, self._version)

    def _close_publication(self, event: Published) -> None:
        for publication in tuple(self._publications):
            if publication.version == event.version and not publication.missing.isdisjoint(event.lanes):
                publication.missing -= set(event.lanes)
                publication.last_answer_ns = event.at_ns
                self._close_if_arrived(publication)

    def _close_if_arrived(self, publication: _Publication) -> None:
        if not publication.missing <= self._left_ns.keys() or publication.last_answer_ns is None:
            return
        self._publications = [each for each in self._publications if each is not publication]
        start_ns, end_ns, version = publication.started_ns, publication.last_answer_ns, publication.version
        if end_ns > start_ns:
            self._keep(Span(TRAINER_LANE, Work.PUBLISH, start_ns, end_ns, version - 1, version=version))

    def _close_trainer_work(self, work: Work, step: int, at_ns: int) -> None:
        if at_ns > self._trainer_since:
            self._keep(Span(TRAINER_LANE, work, self._trainer_since, at_ns, step, version=self._version))

    def _add(self, lane: str, work: Work, start_ns: int, end_ns: int, piece: Slice, version: int = 0) -> None:
        end_ns = max(start_ns, end_ns)
        self._keep(Span(lane, work, start_ns, end_ns, piece.step, piece.group, piece.first, piece.size, version))

    def _keep(self, span: Span) -> None:
        (self.spans.append if self._sink is None else self._sink)(span)
