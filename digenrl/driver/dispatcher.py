"""The runtime of real workers: actions become orders, reports become events, whatever the transport.

It keeps names and numbers, never tensors, and needs no torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.driver.cost_tracker import CostTracker
from digenrl.driver.lanes import Lanes
from digenrl.driver.pending_jobs import Completed, PendingJob, PendingJobs
from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.remaking import remake
from digenrl.driver.repairs import Parts, Repairs
from digenrl.driver.sample_store import SampleStore
from digenrl.driver.step_summary import StepSummary, step_summary
from digenrl.driver.supervisor import Supervisor, WorkerFailedError
from digenrl.driver.weight_versions import WeightVersions
from digenrl.exchange.folder import WeightsReference
from digenrl.records import (
    Action,
    Commit,
    Committed,
    Event,
    Generate,
    Help,
    HelpersReady,
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
)
from digenrl.transports.contract import ArtifactStore, Gone, InputsLost, Message, Transport
from digenrl.worker.assignment import ENCODER, TRAINER, Workers
from digenrl.worker.orders import (
    ChangeRole,
    EncodePrompts,
    GroupsLearnt,
    LayOutWeights,
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
    WeightsLaidOut,
    WeightsLoaded,
    pixels_name,
    slice_name,
)

LOOK_AROUND_S = 0.25  # how long to wait for a report before looking whether the run is to stop


class Dispatcher:
    """Carries out a scheduler's actions by workers. `look_around` is called several times a second."""

    def __init__(
        self,
        recipe: Recipe,
        transport: Transport,
        crew: Workers,
        desk_of: Callable[[Callable[[EncodePrompts], None], Callable[[str], None]], PromptStore],
        exchange: ArtifactStore,
        clock: Callable[[], int],
        look_around: Callable[[], None] = lambda: None,
        on_step: Callable[[StepSummary], None] = lambda numbers: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.recipe, self.crew, self.exchange = recipe, crew, exchange
        self.desk = desk_of(self._send_to_encoder, exchange.drop)
        self._clock, self._look_around, self._on_step = clock, look_around, on_step
        self._post = PendingJobs(transport, clock)
        self._staff = Supervisor(crew, self._post, recipe.lanes.restarts, time.monotonic, say)
        self._lanes = Lanes(crew)
        self._versions = WeightVersions(recipe, exchange)
        self._ledger = SampleStore()
        self._events: deque[Event] = deque()
        self._now_ns = clock()
        self._ticked = True
        self._parked: list[Generate] = []  # until their prompt is encoded
        self._lane_scores: dict[Slice, Scores | str] = {}  # of lanes that score what they make
        self._updates: list[Mapping[str, Any]] = []
        self._publish_s = 0.0
        parts = Parts(recipe, crew, self._post, self._staff, self._lanes, self._versions, self._ledger, exchange)
        self._repairs = Repairs(parts, self._events.append, self._fail, self.desk)

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
        """The opening is known: the first tick hands out work, and others may join."""
        self._now_ns, self._ticked = self._clock(), False
        self._repairs.begin()

    def submit(self, action: Action) -> None:
        """Turns an action into orders."""
        self._SUBMIT[type(action)](self, action)

    def receive(self) -> None:
        """Takes what workers report; waits a little if there is nothing."""
        self._look_around()  # it may raise, so before anything is taken out of the transport
        messages = self._post.transport.receive(LOOK_AROUND_S)
        if messages:  # all at one moment, when the last of them was there
            waited_ns = min(message.waited_ns for message in messages)
            self._now_ns = max(self._now_ns, self._clock() - waited_ns)
        for message in messages:
            self._absorb(message)
        self._staff.look_for_room()

    def send(
        self,
        worker: str,
        order: Order,
        then: Callable[[Completed], None],
        otherwise: Callable[[OrderFailed], None] | None = None,
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Gives an order; `then` is called with its report, or `otherwise` if it fails.

        Without `otherwise`, the run goes on after a failed slice or score, and ends after any other failure.
        `lost` is called when the order's worker is gone, or what it reads; without, it is given again.
        """
        self._post.send(worker, order, then, otherwise, lost)

    def ask(self, orders: Sequence[tuple[str, Order]]) -> list[Any]:
        """Gives orders to several workers at once and waits for all their reports, in the same order."""
        reports: dict[int, Report] = {}

        def keep(index: int) -> Callable[[Completed], None]:
            return lambda answered: reports.update({index: answered.report})

        for index, (worker, order) in enumerate(orders):
            self.send(worker, order, keep(index))
        while len(reports) < len(orders):
            self.receive()
        return [reports[index] for index in range(len(orders))]

    def start_everybody(self) -> None:
        """Starts all workers and waits until they are ready."""
        starting = [each.name for each in self.crew.everybody()]
        for name in tuple(starting):
            self._staff.seek(name, lambda answered: starting.remove(answered.worker))
        self._staff.fill()
        while starting:
            self.receive()

    def export_initial_weights(self, version: int) -> WeightsLaidOut:
        """Has the trainer lay out its version, which is this one; waits for it."""
        order = LayOutWeights(version, self._versions.keeps_state, self.recipe.sharded)
        laid_out: WeightsLaidOut = self.ask([(TRAINER, order)])[0]
        self.take_weights(version, laid_out.weights)
        return laid_out

    @property
    def profile(self) -> CostTracker | None:
        """What things cost, once they were rehearsed."""
        return self._repairs.profile

    def measure(self, profile: CostTracker, slice_size: int) -> None:
        """From now on costs are measured, of slices of this size."""
        self._repairs.profile, self._repairs.slice_size = profile, slice_size

    def lane_names(self) -> Sequence[str]:
        """As the scheduler knows them, generators before helpers, those that joined last."""
        return self._lanes.names

    @property
    def lane_devices(self) -> Mapping[str, str]:
        """Where every lane is, by name."""
        return self._lanes.devices

    @property
    def weights(self) -> tuple[int, WeightsReference] | None:
        """The newest version, once there is one."""
        return self._versions.newest

    def generator_workers(self) -> list[str]:
        """Who evaluates: the generators that are there, or the one worker that does all."""
        return self._staff.generators() if self.crew.generators else [TRAINER]

    @property
    def committing(self) -> bool:
        """Whether an optimizer step is under way that the loop was not told about: no moment to save."""
        return any(isinstance(order, TakeStep) for order in self._post.orders(TRAINER)) or any(
            isinstance(event, Committed) for event in self._events
        )

    def lane_of(self, worker: str) -> str:
        """The row of the trace that shows a worker's own work, among those that the loop has heard of."""
        return self._lanes.row_of(
            worker, {event.offer.name for event in self._events if isinstance(event, WorkerJoined)}
        )

    def encoder(self) -> str:
        """Who encodes prompts."""
        return TRAINER if self.crew.encoder is None else ENCODER

    def reward_workers(self) -> list[str]:
        """Who scores apart from generating; nobody where lanes score what they make."""
        return [each.name for each in self.crew.rewards]

    # --- Actions ----------------------------------------------------------------------------------------------

    def _generate(self, action: Generate) -> None:
        lease = action.lease
        if not self._lanes.worker(lease.lane):
            return  # lost meanwhile, which the scheduler knows or is about to hear
        prompt = self.desk.prompt(lease.slice.step, lease.slice.group)
        if not self.desk.is_encoded(prompt):
            self.desk.ask_for(lease.slice.step, [prompt])
            self._parked.append(action)
            return

        def made(answered: Completed) -> None:
            report = answered.report
            assert isinstance(report, SliceMade)
            if self.profile is not None:
                slices = lease.slice.size // self._repairs.slice_size
                self.profile.add_take(lease.lane, slices, answered.took_ns)
            if not self._ledger.add_made(report.made):
                self._drop_slice(report.made.name)
            elif report.scores is not None or report.score_failure is not None:
                self._lane_scores[lease.slice] = report.scores or str(report.score_failure)
            self._events.append(SliceDone(answered.at_ns, lease))

        self.send(self._lanes.worker(lease.lane), MakeSlice(lease, prompt), made)

    def _score(self, action: Score) -> None:
        piece = action.slice
        if piece in self._lane_scores:
            self._take_scores(piece, action.scorer, self._lane_scores.pop(piece), self._now_ns)
            return
        of = self._ledger.slice_of(piece)
        assert of is not None, f"{piece} is to be scored, but nobody made it"
        prompt = self.desk.prompt(piece.step, piece.group)

        def rated(answered: Completed) -> None:
            report = answered.report
            assert isinstance(report, SamplesRated)
            if self.profile is not None:
                self.profile.add("score", answered.took_ns // piece.size)
            self._take_scores(piece, action.scorer, report.scores, answered.at_ns)
            if self._ledger.all_scored(of):
                self.exchange.drop(pixels_name(of.name))

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

        def learnt(index: int, answered: Completed) -> None:
            assert isinstance(answered.report, GroupsLearnt) and isinstance(answered.order, LearnGroups)
            self._updates += answered.report.updates
            self._repairs.learnt += answered.order.groups
            self._measure("train_sample", answered, action.slices[index].size)
            if index + 1 < len(action.slices):
                learn(index + 1)
            else:
                self._events.append(Trained(answered.at_ns, action.slices))

        learn(0)

    def _commit(self, action: Commit) -> None:
        self.send(
            TRAINER, TakeStep(action.step, self._versions.keeps_state, self.recipe.sharded), self._step_taken
        )

    def _step_taken(self, answered: Completed) -> None:
        report = answered.report
        assert isinstance(report, StepTaken)
        self._measure("commit", answered)
        rewards, parts, made = self._ledger.close_step(report.step)
        for each in made:
            self._drop_slice(each.name)
        updates = (*self._updates, *report.updates)
        self._updates, self._repairs.learnt = [], []
        self.take_weights(report.step + 1, report.weights)
        self.desk.close_step(report.step)
        if report.step + 2 < self.recipe.steps:
            self.desk.open_step(report.step + 2)
        publish_s, self._publish_s = self._publish_s, 0.0  # of the slowest lane, for the version before this one
        self._on_step(step_summary(report.step, rewards, parts, updates, report.weights.bytes, publish_s))
        self._events.append(Committed(answered.at_ns, report.step))
        if self.profile is not None:
            self._events.append(self.profile.costs(answered.at_ns))

    def take_weights(self, version: int, weights: WeightsReference) -> None:
        """A new version lies in the exchange; older ones go as soon as nobody is about to load them."""
        self._versions.take(version, weights)
        self._versions.drop_old(self._post.orders())

    def _publish(self, action: Publish) -> None:
        for lane in action.lanes:
            self._publish_to(lane, action.version)

    def _publish_to(self, lane: int, asked: int) -> None:
        """The newest version there is: one that came meanwhile serves as well as the one asked for."""
        assert self.weights is not None
        if not self._lanes.worker(lane):
            return  # lost meanwhile, which the scheduler is about to hear

        def loaded(answered: Completed) -> None:
            assert isinstance(answered.report, WeightsLoaded)
            if self.profile is not None:
                self.profile.add("publish", round(answered.report.seconds * 1e9))
            self._publish_s = max(self._publish_s, answered.report.seconds)
            self._versions.drop_old(self._post.orders())
            self._events.append(Published(answered.at_ns, asked, (lane,)))

        self.send(self._lanes.worker(lane), LoadWeights(*self.weights), loaded)

    def _help(self, action: Help) -> None:
        self._change_role(generating=True)

    def _return(self, action: Return) -> None:
        self._change_role(generating=False)

    def _change_role(self, generating: bool) -> None:
        def changed(answered: Completed) -> None:
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

    _SUBMIT: ClassVar[dict[type[Action], Callable[[Dispatcher, Any], None]]] = {
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
            self._repairs.replace(worker, report, self._now_ns)
            return
        expected, answered = self._post.answer(message, self._now_ns)
        if isinstance(report, InputsLost):
            remake(worker, expected, report.names, by=self._repairs)
        elif isinstance(report, OrderFailed):
            self._fail(worker, expected, report)
        else:
            if isinstance(report, WeightsLoaded):
                self._repairs.serves(worker, report.version)
            expected.then(answered)

    def _fail(self, worker: str, expected: PendingJob, report: OrderFailed) -> None:
        order = expected.order
        if expected.otherwise is not None:
            expected.otherwise(report)
        elif isinstance(order, MakeSlice):
            self._drop_slice(slice_name(order.lease))
            self._events.append(SliceFailed(self._now_ns, order.lease, report.reason))
        elif isinstance(order, ScoreSamples):
            scorer = self.reward_workers().index(worker)
            self._events.append(ScoreFailed(self._now_ns, order.slice, scorer, report.reason))
        else:
            raise_failure(worker, report)

    # --- Prompts and files ------------------------------------------------------------------------------------

    def _send_to_encoder(self, order: EncodePrompts) -> None:
        def encoded(answered: Completed) -> None:
            assert isinstance(answered.report, PromptsEncoded)
            self.desk.mark_encoded(answered.report.rows)
            parked, self._parked = self._parked, []
            for action in parked:
                self._generate(action)

        self.send(self.encoder(), order, encoded)

    def _drop_slice(self, name: str) -> None:
        self.exchange.drop(name)
        self.exchange.drop(pixels_name(name))

    def _measure(self, kind: str, answered: Completed, samples: int = 1) -> None:
        if self.profile is not None:
            self.profile.add(kind, answered.took_ns // samples)


def raise_failure(worker: str, report: OrderFailed) -> NoReturn:
    """Ends the run: a mistake is the user's to mend, anything else comes with its details."""
    if report.mistake:
        raise ConfigError(report.reason)
    raise WorkerFailedError(f"{worker} could not go on: {report.reason}\n{report.details}".rstrip())
