"""The runtime of real workers: actions become orders, reports become events, whatever the transport.

It keeps names and numbers, never tensors, and needs no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.exchange.folder import ExchangeFolder, WeightsReference
from digenrl.records import (
    Action,
    Commit,
    Committed,
    Event,
    Generate,
    Help,
    HelpersReady,
    LaneOffer,
    Publish,
    Published,
    Quarantine,
    Return,
    SamplesScored,
    Score,
    ScoreFailed,
    Slice,
    SliceDone,
    SliceFailed,
    Tick,
    Train,
    Trained,
    TrainerReturned,
    Wait,
    WorkerJoined,
    WorkerLost,
)
from digenrl.runtimes.ledger import Ledger
from digenrl.runtimes.placement import ENCODER, TRAINER, Crew
from digenrl.runtimes.profile import RunningProfile
from digenrl.runtimes.prompt_desk import PromptDesk
from digenrl.runtimes.step_numbers import StepNumbers, step_numbers
from digenrl.runtimes.transport import Gone, Message, Transport
from digenrl.workers.assignment import Assignment
from digenrl.workers.orders import (
    ChangeRole,
    EncodePrompts,
    EvaluatePrompts,
    GroupsLearnt,
    LearnGroups,
    LoadWeights,
    MakeSlice,
    Order,
    OrderFailed,
    PromptsEncoded,
    Report,
    SamplesRated,
    Scores,
    ScoreSamples,
    SliceMade,
    StepTaken,
    TakeStep,
    WeightsLoaded,
    slice_name,
)

SHARED_LANE = "device-0"  # what generates in mode colocated
LOOK_AROUND_S = 0.25  # how long to wait for a report before looking whether the run is to stop


class WorkerFailedError(RuntimeError):
    """A worker that a run cannot do without is lost or cannot go on."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A report, when its order began (it may have waited behind others) and when it was answered."""

    report: Report
    began_ns: int
    at_ns: int

    @property
    def took_ns(self) -> int:
        """How long the worker was at it, as the driver saw it."""
        return self.at_ns - self.began_ns


@dataclass(frozen=True, slots=True)
class _Expected:
    order: Order
    sent_ns: int
    then: Callable[[Answered], None]
    otherwise: Callable[[OrderFailed], None] | None = None


class WorkRuntime:
    """Carries out a scheduler's actions by workers. `look_around` is called several times a second."""

    def __init__(
        self,
        recipe: Recipe,
        transport: Transport,
        crew: Crew,
        desk_of: Callable[[Callable[[EncodePrompts], None], Callable[[str], None]], PromptDesk],
        exchange: ExchangeFolder,
        clock: Callable[[], int],
        look_around: Callable[[], None] = lambda: None,
        on_step: Callable[[StepNumbers], None] = lambda numbers: None,
    ) -> None:
        self.recipe, self.transport, self.crew, self.exchange = recipe, transport, crew, exchange
        self.desk = desk_of(self._send_to_encoder, exchange.drop)
        self.profile: RunningProfile | None = None  # once rehearsed
        self.weights: tuple[int, WeightsReference] | None = None  # the newest version
        self._laid_out: list[str] = []  # names of versions in the exchange, the newest last
        self._clock, self._look_around, self._on_step = clock, look_around, on_step
        self._expected: dict[str, deque[_Expected]] = {each.name: deque() for each in crew.everybody()}
        self._free_since: dict[str, int] = {}
        self._events: deque[Event] = deque()
        self._now_ns = clock()
        self._ticked = True
        self._begun = False
        self._lanes: list[str] = [g.name for g in crew.generators] or [TRAINER]
        self._lane_names = [g.name for g in crew.generators] or [SHARED_LANE]
        if crew.generators and "generate" in crew.trainer.duties:
            self._lanes.append(TRAINER)
            self._lane_names.append("helper-0")
        self.lane_devices = {
            name: self._assignment(worker).device
            for name, worker in zip(self._lane_names, self._lanes, strict=True)
        }
        self._parked: list[Generate] = []  # until their prompt is encoded
        self._lane_scores: dict[Slice, Scores | str] = {}  # of lanes that score what they make
        self._ledger = Ledger()
        self._updates: list[Mapping[str, Any]] = []
        self._restarts: dict[str, int] = {}
        self._publish_s = 0.0

    # --- The loop's side --------------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """The next fact; after all facts of an instant, a tick; then waits for reports."""
        while not self._events:
            if not self._ticked:
                self._ticked = True
                return Tick(self._now_ns)
            self.receive()
        return self._events.popleft()

    def begin(self) -> None:
        """The opening is known: the first tick hands out work."""
        self._now_ns, self._ticked, self._begun = self._clock(), False, True

    def submit(self, action: Action) -> None:
        """Turns an action into orders."""
        self._SUBMIT[type(action)](self, action)

    def receive(self) -> None:
        """Takes what workers report; waits a little if there is nothing."""
        self._look_around()  # it may raise, so before anything is taken out of the transport
        messages = self.transport.receive(LOOK_AROUND_S)
        if messages:
            self._now_ns = self._clock()
        for message in messages:
            self._absorb(message)

    def send(
        self,
        worker: str,
        order: Order,
        then: Callable[[Answered], None],
        otherwise: Callable[[OrderFailed], None] | None = None,
    ) -> None:
        """Gives an order; `then` is called with its report, or `otherwise` if it fails.

        Without `otherwise`, the run goes on after a failed slice or score, and ends after any other failure.
        """
        self._expected[worker].append(_Expected(order, self._clock(), then, otherwise))
        self.transport.send(worker, order)

    def ask(self, orders: Sequence[tuple[str, Order]]) -> list[Any]:
        """Gives orders to several workers at once and waits for all their reports, in the same order."""
        reports: dict[int, Report] = {}

        def keep(index: int) -> Callable[[Answered], None]:
            return lambda answered: reports.update({index: answered.report})

        for index, (worker, order) in enumerate(orders):
            self.send(worker, order, keep(index))
        while len(reports) < len(orders):
            self.receive()
        return [reports[index] for index in range(len(orders))]

    def start_everybody(self) -> None:
        """Starts all workers and waits until they are ready."""
        for assignment in self.crew.everybody():
            self._start(assignment, lambda answered: None)
        while any(self._expected.values()):
            self.receive()

    def lane_names(self) -> Sequence[str]:
        """As the scheduler knows them, generators before the helper."""
        return self._lane_names

    def generator_workers(self) -> list[str]:
        """Who evaluates: the generators, also one that is being replaced, or the one worker that does all."""
        return [each.name for each in self.crew.generators] or [TRAINER]

    @property
    def committing(self) -> bool:
        """Whether an optimizer step is under way that the loop was not told about: no moment to save."""
        orders = self._expected.get(TRAINER, ())
        return any(isinstance(each.order, TakeStep) for each in orders) or any(
            isinstance(event, Committed) for event in self._events
        )

    def lane_of(self, worker: str) -> str:
        """The row of the trace that shows a worker's own work, among those that the loop has heard of."""
        unheard = {event.offer.name for event in self._events if isinstance(event, WorkerJoined)}
        rows = zip(self._lanes, self._lane_names, strict=True)
        own = {name: lane for name, lane in rows if name != TRAINER and lane not in unheard}
        return own.get(worker, worker)

    def encoder(self) -> str:
        """Who encodes prompts."""
        return TRAINER if self.crew.encoder is None else ENCODER

    def reward_workers(self) -> list[str]:
        """Who scores apart from generating; nobody where lanes score what they make."""
        return [each.name for each in self.crew.rewards]

    # --- Actions ----------------------------------------------------------------------------------------------

    def _generate(self, action: Generate) -> None:
        lease = action.lease
        if not self._lanes[lease.lane]:
            return  # lost meanwhile, which the scheduler knows or is about to hear
        prompt = self.desk.prompt(lease.slice.step, lease.slice.group)
        if not self.desk.is_encoded(prompt):
            self.desk.ask_for(lease.slice.step, [prompt])
            self._parked.append(action)
            return

        def made(answered: Answered) -> None:
            report = answered.report
            assert isinstance(report, SliceMade)
            self._measure_slice(lease.lane, answered)
            if not self._ledger.add_made(report.made):
                self._drop_slice(report.made.name)
            elif report.scores is not None or report.score_failure is not None:
                self._lane_scores[lease.slice] = report.scores or str(report.score_failure)
            self._events.append(SliceDone(answered.at_ns, lease))

        self.send(self._lanes[lease.lane], MakeSlice(lease, prompt), made)

    def _score(self, action: Score) -> None:
        piece = action.slice
        if piece in self._lane_scores:
            self._take_scores(piece, action.scorer, self._lane_scores.pop(piece), self._now_ns)
            return
        of = self._ledger.slice_of(piece)
        assert of is not None, f"{piece} is to be scored, but nobody made it"
        prompt = self.desk.prompt(piece.step, piece.group)

        def rated(answered: Answered) -> None:
            report = answered.report
            assert isinstance(report, SamplesRated)
            if self.profile is not None:
                self.profile.add("score", answered.took_ns // piece.size)
            self._take_scores(piece, action.scorer, report.scores, answered.at_ns)
            if self._ledger.all_scored(of):
                self.exchange.drop(f"{of.name}-pixels")

        self.send(self.crew.rewards[action.scorer].name, ScoreSamples(piece, of, prompt), rated)

    def _take_scores(self, piece: Slice, scorer: int, scores: Scores | str, at_ns: int) -> None:
        if isinstance(scores, str):
            self._events.append(ScoreFailed(at_ns, piece, scorer, scores))
            return
        self._ledger.add_scores(piece, scores)
        self._events.append(SamplesScored(at_ns, piece, scorer))

    def _train(self, action: Train) -> None:
        """Group by group: what else the trainer is to do, as to save, waits for one group at most."""

        def learn(index: int) -> None:
            piece = action.slices[index]
            group = self._ledger.learnable(piece, self.desk.prompt(piece.step, piece.group))
            self.send(TRAINER, LearnGroups((group,)), lambda answered: learnt(index, answered))

        def learnt(index: int, answered: Answered) -> None:
            assert isinstance(answered.report, GroupsLearnt)
            self._updates += answered.report.updates
            self._measure("train_sample", answered, action.slices[index].size)
            if index + 1 < len(action.slices):
                learn(index + 1)
            else:
                self._events.append(Trained(answered.at_ns, action.slices))

        learn(0)

    def _commit(self, action: Commit) -> None:
        self.send(TRAINER, TakeStep(action.step), self._step_taken)

    def _step_taken(self, answered: Answered) -> None:
        report = answered.report
        assert isinstance(report, StepTaken)
        self._measure("commit", answered)
        rewards, parts, made = self._ledger.close_step(report.step)
        for each in made:
            self._drop_slice(each.name)
        updates = (*self._updates, *report.updates)
        self._updates = []
        self.take_weights(report.step + 1, report.weights)
        self.desk.close_step(report.step)
        if report.step + 2 < self.recipe.steps:
            self.desk.open_step(report.step + 2)
        publish_s, self._publish_s = self._publish_s, 0.0  # of the slowest lane, for the version before this one
        self._on_step(step_numbers(report.step, rewards, parts, updates, report.weights.bytes, publish_s))
        self._events.append(Committed(answered.at_ns, report.step))
        if self.profile is not None:
            self._events.append(self.profile.costs(answered.at_ns))

    def take_weights(self, version: int, weights: WeightsReference) -> None:
        """A new version lies in the exchange; older ones go as soon as nobody is about to load them."""
        self.weights = (version, weights)
        self._laid_out.append(weights.name)
        self._drop_old_weights()

    def _drop_old_weights(self) -> None:
        orders = (expected.order for queue in self._expected.values() for expected in queue)
        awaited = {order.weights.name for order in orders if isinstance(order, LoadWeights | EvaluatePrompts)}
        for name in self._laid_out[:-1]:
            if name not in awaited:
                self.exchange.drop(name)
                self._laid_out.remove(name)

    def _publish(self, action: Publish) -> None:
        for lane in action.lanes:
            self._publish_to(lane, action.version)

    def _publish_to(self, lane: int, asked: int) -> None:
        """The newest version there is: one that came meanwhile serves as well as the one asked for."""
        assert self.weights is not None
        version, weights = self.weights
        if not self._lanes[lane]:
            return  # lost meanwhile, which the scheduler is about to hear

        def loaded(answered: Answered) -> None:
            assert isinstance(answered.report, WeightsLoaded)
            if self.profile is not None:
                self.profile.add("publish", round(answered.report.seconds * 1e9))
            self._publish_s = max(self._publish_s, answered.report.seconds)
            self._drop_old_weights()
            self._events.append(Published(answered.at_ns, asked, (lane,)))

        self.send(self._lanes[lane], LoadWeights(version, weights), loaded)

    def _help(self, action: Help) -> None:
        self._change_role(generating=True)

    def _return(self, action: Return) -> None:
        self._change_role(generating=False)

    def _change_role(self, generating: bool) -> None:
        def changed(answered: Answered) -> None:
            self._measure("switch_in" if generating else "switch_out", answered)
            event = HelpersReady if generating else TrainerReturned
            self._events.append(event(answered.at_ns))

        self.send(TRAINER, ChangeRole(generating), changed)

    def _quarantine(self, action: Quarantine) -> None:
        for made in self._ledger.replace(action.step, action.group, action.replaced_by):
            self._drop_slice(made.name)
            self._lane_scores.pop(made.slice, None)
        self.desk.ask_for(action.step, [self.desk.prompt(action.step, action.replaced_by)])

    def _wait(self, action: Wait) -> None:
        """Nothing to do."""

    _SUBMIT: ClassVar[dict[type[Action], Callable[[WorkRuntime, Any], None]]] = {
        Generate: _generate,
        Score: _score,
        Train: _train,
        Commit: _commit,
        Publish: _publish,
        Help: _help,
        Return: _return,
        Quarantine: _quarantine,
        Wait: _wait,
    }

    # --- Reports ----------------------------------------------------------------------------------------------

    def _absorb(self, message: Message) -> None:
        self._ticked = False
        worker, report = message.worker, message.report
        if isinstance(report, Gone):
            self._lose(worker, report.reason)
            return
        expected = self._expected[worker].popleft()
        began = max(expected.sent_ns, self._free_since.get(worker, 0))
        self._free_since[worker] = self._now_ns
        if isinstance(report, OrderFailed):
            otherwise = expected.otherwise
            self._fail(worker, expected.order, report) if otherwise is None else otherwise(report)
        else:
            expected.then(Answered(report, began, self._now_ns))

    def _fail(self, worker: str, order: Order, report: OrderFailed) -> None:
        if isinstance(order, MakeSlice):
            self._drop_slice(slice_name(order.lease))
            self._events.append(SliceFailed(self._now_ns, order.lease, report.reason))
        elif isinstance(order, ScoreSamples):
            scorer = self.reward_workers().index(worker)
            self._events.append(ScoreFailed(self._now_ns, order.slice, scorer, report.reason))
        else:
            raise_failure(worker, report)

    def _lose(self, worker: str, reason: str) -> None:
        """Replaces a worker that a run can do without for a while; what it held is done again.

        Before the loop has begun, the new one takes the place of the old. After that, a lane is lost for good and
        a new one joins, which the scheduler hands slices and weights.
        """
        orders = self._expected.pop(worker)
        used = self._restarts.get(worker, 0)
        if worker == TRAINER or used >= self.recipe.lanes.restarts:
            again = f", after {used} restarts" if used else ""
            raise WorkerFailedError(f"{worker} {reason}{again}; see its file in the run's logs")
        self._restarts[worker] = used + 1
        assignment = self._assignment(worker)
        lost = [lane for lane, name in enumerate(self._lanes) if name == worker] if self._begun else []
        for lane in lost:
            self._lanes[lane] = ""
            self._events.append(WorkerLost(self._now_ns, lane))
        self._expected[worker] = deque()
        self._free_since.pop(worker, None)
        starting = [each.then for each in orders if each.order == Order()]  # it had not even come up
        if lost:
            self._start(assignment, lambda answered: self._join(worker, lost[-1], answered.at_ns))
        else:
            self._start(assignment, starting[0] if starting else lambda answered: None)
        if not self._begun and self.weights is not None and worker in self.generator_workers():
            self.send(worker, LoadWeights(*self.weights), lambda answered: None)
        for each in orders:
            if isinstance(each.order, MakeSlice):
                self._drop_slice(slice_name(each.order.lease))
            elif each.order != Order() and not (self._begun and isinstance(each.order, LoadWeights)):
                self.send(worker, each.order, each.then, each.otherwise)

    def _join(self, worker: str, replaces: int, at_ns: int) -> None:
        lane = len(self._lanes)
        self._lanes.append(worker)
        slice_ns = self.profile.slice_ns(replaces) if self.profile is not None else 1
        if self.profile is not None:
            self.profile.add_lane(lane, slice_ns)
        name = f"{worker} ({self._restarts[worker] + 1})"
        self._lane_names.append(name)
        self.lane_devices[name] = self._assignment(worker).device
        self._events.append(WorkerJoined(at_ns, LaneOffer(name, slice_ns)))

    def _assignment(self, worker: str) -> Assignment:
        return next(each for each in self.crew.everybody() if each.name == worker)

    def _start(self, assignment: Assignment, ready: Callable[[Answered], None]) -> None:
        self._expected[assignment.name].append(_Expected(Order(), self._clock(), ready))
        self.transport.start(assignment)

    # --- Prompts and files ------------------------------------------------------------------------------------

    def _send_to_encoder(self, order: EncodePrompts) -> None:
        def encoded(answered: Answered) -> None:
            assert isinstance(answered.report, PromptsEncoded)
            self.desk.mark_encoded(answered.report.rows)
            parked, self._parked = self._parked, []
            for action in parked:
                self._generate(action)

        self.send(self.encoder(), order, encoded)

    def _drop_slice(self, name: str) -> None:
        self.exchange.drop(name)
        self.exchange.drop(f"{name}-pixels")

    def _measure_slice(self, lane: int, answered: Answered) -> None:
        if self.profile is not None:
            self.profile.add_slice(lane, answered.took_ns)

    def _measure(self, kind: str, answered: Answered, samples: int = 1) -> None:
        if self.profile is not None:
            self.profile.add(kind, answered.took_ns // samples)


def raise_failure(worker: str, report: OrderFailed) -> NoReturn:
    """Ends the run: a mistake is the user's to mend, anything else comes with its details."""
    if report.mistake:
        raise ConfigError(report.reason)
    raise WorkerFailedError(f"{worker} could not go on: {report.reason}\n{report.details}".rstrip())
