"""Workers without models, to test a runtime with: they keep a real crew's rules, in an order that dice choose.

Files in the exchange are empty but real: an order fails where it names one that is not there.
Workers answer one order at a time, several of them may report in one go, and dice may end one at any moment.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from digenrl.worker.orders import (
    ChangeRole,
    CheckpointSaved,
    EncodePrompts,
    EvaluatePrompts,
    GroupsLearnt,
    LayOutWeights,
    LearnGroups,
    LoadWeights,
    MadeSlice,
    MakeSlice,
    MakingRehearsed,
    Order,
    OrderFailed,
    PromptsEncoded,
    PromptsEvaluated,
    PromptsSampled,
    Ready,
    RehearseMaking,
    Report,
    RestoreState,
    RoleChanged,
    SamplesRated,
    SaveCheckpoint,
    ScoreEvaluation,
    Scores,
    ScoreSamples,
    SliceMade,
    StateRestored,
    StepTaken,
    TakeStep,
    WeightsLaidOut,
    WeightsLoaded,
    slice_name,
)

from digenrl.config.reading import parse_model
from digenrl.config.recipe import Recipe
from digenrl.driver.calibration import Calibration, initial_scheduler_state
from digenrl.driver.dispatcher import Dispatcher
from digenrl.driver.placement import place
from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.step_summary import StepSummary
from digenrl.exchange.folder import ExchangeFolder
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt
from digenrl.records import WeightsReference
from digenrl.scheduling import SchedulerState
from digenrl.transports.contract import Gone, InputsLost, Message
from digenrl.worker.assignment import TRAINER, Assignment, Machine, Workers

UPDATE: dict[str, Any] = {
    "gradient_norm": 1.0,
    "ratio_mean": 1.0,
    "ratio_max": 1.5,
    "clip_fraction": 0.25,
    "kl": None,
    "log_prob_mismatch": 0.0,
    "memory_retries": None,
    "zero_spread_groups": 1,
    "pack_size": 4,
}
RECIPE: dict[str, Any] = {
    "steps": 3,
    "model": {"family": "sd3", "source": "nowhere"},
    "prompts": {"path": "prompts.txt"},
    "rewards": "jpeg_compressibility",
    "sample": {"height": 16, "width": 16},
    "batch": {"prompts": 3, "samples_per_prompt": 4, "slice": 2},
    "algorithm": {"name": "flow_grpo"},
    "lanes": {"generators": ["cpu", "cpu"]},
}


def fake_recipe(**changes: Any) -> Recipe:
    """RECIPE with some of its keys changed; mappings are merged."""
    content = dict(RECIPE)
    for key, value in changes.items():
        content[key] = {**content.get(key, {}), **value} if isinstance(value, Mapping) else value
    return parse_model(Recipe, content)


@dataclass
class _FakeWorker:
    assignment: Assignment
    orders: dict[int | None, Order] = field(default_factory=dict)  # by job id; None is the start
    version: int = 0


class FakeCrew:
    """A transport. `fails` says why an order fails, if it does; `kills_left` workers are ended by dice."""

    def __init__(
        self,
        exchange: ExchangeFolder,
        dice: random.Random,
        *,
        kills: int = 0,
        fails: Callable[[Order], str | None] = lambda order: None,
        mortal_trainer: bool = False,
        vanishing: int = 0,
    ) -> None:
        self._exchange, self._dice, self._fails = exchange, dice, fails
        self.kills_left, self.vanishing_left = kills, vanishing
        self._mortal_trainer = mortal_trainer
        self._vanished: set[str] = set()
        self.no_room_for: set[str] = set()
        self.workers: dict[str, _FakeWorker] = {}
        self.trained: list[tuple[int, tuple[int, ...]]] = []  # step, and the place and samples of each group
        self.log: list[tuple[str, Order]] = []  # what was answered
        self._batch = self._committed = 0
        self._waiting: deque[Message] = deque()
        self._carry_out: dict[type[Order], Callable[[_FakeWorker, Any], Report]] = {
            Order: lambda worker, order: Ready(),
            EncodePrompts: self._encode,
            MakeSlice: self._make,
            ScoreSamples: self._score,
            LearnGroups: self._learn,
            TakeStep: self._take_step,
            LoadWeights: self._load,
            LayOutWeights: self._lay_out,
            RestoreState: self._restore,
            ChangeRole: lambda worker, order: RoleChanged(order.generating),
            EvaluatePrompts: self._evaluate,
            ScoreEvaluation: self._score_evaluation,
            SaveCheckpoint: self._save,
            RehearseMaking: lambda worker, order: MakingRehearsed(dict.fromkeys(order.sizes, 0.01)),
        }

    # --- Transport ----------------------------------------------------------------------------------------------

    def start(self, assignment: Assignment) -> None:
        assert assignment.name not in self.workers, f"{assignment.name} is there already"
        self.workers[assignment.name] = _FakeWorker(assignment, {None: Order()})

    def send(self, worker: str, job_id: int, order: Order) -> None:
        if worker in self.workers:
            self.workers[worker].orders[job_id] = order

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """What was prepared, or the reports of some of those who have something to do, one each."""
        if self._waiting:
            messages = list(self._waiting)
            self._waiting.clear()
            return messages
        busy = [name for name, worker in self.workers.items() if worker.orders]
        assert busy, "everybody waits: the run hangs"
        for name in self._dice.sample(busy, self._dice.randint(1, len(busy))):
            self.answer(name)
        mortal = [name for name in self.workers if name != TRAINER or self._mortal_trainer]
        if self.kills_left and self._dice.random() < 0.08:
            self.kills_left -= 1
            self.kill(self._dice.choice(mortal))
        if self.vanishing_left and self._dice.random() < 0.1:
            self.vanishing_left -= 1
            self.vanish(*(name for name in self._exchange.names() if self._dice.random() < 0.5))
        messages = list(self._waiting)
        self._waiting.clear()
        return messages

    def has_room(self, assignment: Assignment) -> bool:
        return assignment.name not in self.no_room_for

    def end(self, worker: str) -> None:
        self.workers.pop(worker, None)

    def stop(self) -> None:
        self.workers.clear()

    # --- The test's hands ---------------------------------------------------------------------------------------

    def answer(self, name: str, count: int = 1) -> None:
        """The worker's oldest orders are carried out; the reports wait for `receive`."""
        for _ in range(count):
            worker = self.workers[name]
            job_id = next(iter(worker.orders))
            order = worker.orders.pop(job_id)
            self.log.append((name, order))
            self._waiting.append(Message(name, job_id, self._report(worker, order)))

    def answer_all(self) -> None:
        """Everybody carries out everything."""
        for name, worker in self.workers.items():
            self.answer(name, len(worker.orders))

    def kill(self, name: str) -> None:
        """The worker is gone, with its orders; a trainer also with its open gradient."""
        del self.workers[name]
        if name == TRAINER:
            self.trained = [each for each in self.trained if each[0] < self._committed]
            self._batch = 0  # who takes its place begins anew, unless it is told where to go on
        self._waiting.append(Message(name, None, Gone("ended by signal 9 (SIGKILL)")))

    def vanish(self, *names: str) -> None:
        """These names are lost with a machine; the trainer's state has a copy elsewhere."""
        for name in names:
            if not name.startswith("state-"):
                self._exchange.drop(name)
                self._vanished.add(name)

    def orders_of(self, name: str) -> list[type[Order]]:
        """The kinds of orders that a worker has before it."""
        return [type(order) for order in self.workers[name].orders.values()]

    # --- What workers do ----------------------------------------------------------------------------------------

    def _report(self, worker: _FakeWorker, order: Order) -> Report:
        reason = self._fails(order)
        if reason is not None:
            if isinstance(order, MakeSlice):
                self._put(slice_name(order.lease))  # it may fail when half of it is done
            return OrderFailed(order, reason, mistake=True)
        try:
            return self._carry_out[type(order)](worker, order)
        except FileNotFoundError as error:
            lost = tuple(name for name in order.reads() if name in self._vanished)
            return InputsLost(lost) if lost else OrderFailed(order, f"FileNotFoundError: {error}")

    def _put(self, *names: str) -> None:
        for name in names:
            self._exchange.path(name).touch()
            self._vanished.discard(name)

    def _need(self, names: Iterable[str]) -> None:
        for name in names:
            if not self._exchange.path(name).exists():
                raise FileNotFoundError(name)

    def _version(self, worker: _FakeWorker) -> int:
        return self._batch if "train" in worker.assignment.duties else worker.version

    def _serve(self, worker: _FakeWorker, version: int, weights: WeightsReference) -> None:
        if version > worker.version:
            self._need([weights.name])
            worker.version = version

    def _encode(self, worker: _FakeWorker, order: EncodePrompts) -> Report:
        self._put(*(prompt.row for prompt in order.prompts))
        return PromptsEncoded(tuple(prompt.row for prompt in order.prompts))

    def _make(self, worker: _FakeWorker, order: MakeSlice) -> Report:
        self._need([order.prompt.row])
        version, name, piece = self._version(worker), slice_name(order.lease), order.lease.slice
        assert piece.step - 1 <= version <= piece.step, f"{order.lease} is made with version {version}"
        assert version >= order.lease.version, f"{order.lease} asks for weights that never came"
        self._put(name)
        made = MadeSlice(piece, name, version)
        if "score" in worker.assignment.duties:
            return SliceMade(order.lease, made, _scores(piece.size))
        self._put(f"{name}-pixels")
        return SliceMade(order.lease, made)

    def _score(self, worker: _FakeWorker, order: ScoreSamples) -> Report:
        self._need([f"{order.of.name}-pixels"])
        return SamplesRated(order.slice, _scores(order.slice.size))

    def _learn(self, worker: _FakeWorker, order: LearnGroups) -> Report:
        for group in order.groups:
            self._need([group.prompt.row, *(made.name for made in group.slices)])
            assert {made.slice.step for made in group.slices} == {self._batch}
            samples = tuple(sample.index for made in group.slices for sample in made.slice.samples())
            assert samples == tuple(range(len(group.rewards)))
            self.trained.append((self._batch, (group.place, *samples)))
        return GroupsLearnt(())

    def _take_step(self, worker: _FakeWorker, order: TakeStep) -> Report:
        assert order.step == self._batch
        self._batch = self._committed = order.step + 1
        self._put(*order.leaves())
        return StepTaken(order.step, (UPDATE,), self._laid_out())

    def _lay_out(self, worker: _FakeWorker, order: LayOutWeights) -> Report:
        if order.version != self._batch:
            return WeightsLaidOut(self._batch, WeightsReference("", 0, 0))
        self._put(*order.leaves())
        return WeightsLaidOut(self._batch, self._laid_out())

    def _restore(self, worker: _FakeWorker, order: RestoreState) -> Report:
        self._need(order.reads())
        self._batch = order.version
        return StateRestored(order.version)

    def _laid_out(self) -> WeightsReference:
        self._put(f"weights-{self._batch}")
        return WeightsReference(f"weights-{self._batch}", 100, 7)

    def _load(self, worker: _FakeWorker, order: LoadWeights) -> Report:
        self._serve(worker, order.version, order.weights)
        return WeightsLoaded(order.version, 0.001)

    def _evaluate(self, worker: _FakeWorker, order: EvaluatePrompts) -> Report:
        self._need(prompt.row for prompt in order.prompts)
        self._serve(worker, order.version, order.weights)
        version = self._version(worker)
        assert version == order.version, f"an evaluation of version {order.version} is made with {version}"
        self._put(order.name)
        return PromptsSampled(order.name)

    def _score_evaluation(self, worker: _FakeWorker, order: ScoreEvaluation) -> Report:
        assert "score" in worker.assignment.duties
        self._need([order.name])
        return PromptsEvaluated(order.first, _scores(len(order.prompts), order.first))

    def _save(self, worker: _FakeWorker, order: SaveCheckpoint) -> Report:
        assert order.step == self._batch, f"to save step {order.step}, but the trainer is at {self._batch}"
        return CheckpointSaved(order.step, f"step_{order.step:06d}")


def _scores(count: int, first: int = 0) -> Scores:
    values = tuple(float(first + index) for index in range(count))
    return Scores(values, {"size": values})


def with_reserve(crew: Workers, count: int) -> Workers:
    """The crew, and so many generators that may join."""
    names = (f"generator-{len(crew.generators) + index}" for index in range(count))
    return replace(crew, reserve=tuple(replace(crew.generators[0], name=name) for name in names))


def in_pools(crew: Workers, pools: Sequence[str]) -> Workers:
    """The crew, with its generators in these pools, one after the other."""
    names = (*pools, *[None] * (len(crew.generators) - len(pools)))
    placed = tuple(replace(each, pool=pool) for each, pool in zip(crew.generators, names, strict=True))
    return replace(crew, generators=placed)


class FakeRun:
    """A runtime and its crew, and a clock that goes on by a millisecond whenever somebody looks."""

    def __init__(
        self,
        root: Path,
        recipe: Recipe,
        *,
        seed: int = 0,
        kills: int = 0,
        fails: Callable[[Order], str | None] = lambda order: None,
        prompts: int = 5,
        kept_rows: int = 1024,
        mortal_trainer: bool = False,
        vanishing: int = 0,
        reserve: int = 0,
        pools: Sequence[str] = (),
    ) -> None:
        self.exchange = ExchangeFolder(root)
        self.crew = FakeCrew(
            self.exchange,
            random.Random(seed),
            kills=kills,
            fails=fails,
            mortal_trainer=mortal_trainer,
            vanishing=vanishing,
        )
        self.steps: list[StepSummary] = []
        self._ns = 0
        sampler = PromptSampler(
            [Prompt(index, f"prompt {index}") for index in range(prompts)], recipe.batch.prompts, recipe.seed
        )
        self.runtime = Dispatcher(
            recipe,
            self.crew,
            in_pools(with_reserve(place(recipe, Machine((0, 1)), root), reserve), pools),
            lambda send, drop: PromptStore(sampler, send, drop, kept_rows),
            self.exchange,
            self.clock,
            on_step=self.steps.append,
        )

    def clock(self) -> int:
        """Every look takes a millisecond."""
        self._ns += 1_000_000
        return self._ns

    def open(self, slice_size: int = 2) -> SchedulerState:
        """As a run is opened, with a rehearsal that nobody measured."""
        runtime, lanes = self.runtime, self.runtime.lane_names()
        runtime.start_everybody()
        for step in range(min(2, runtime.recipe.steps)):
            runtime.desk.open_step(step)
        while not runtime.desk.all_encoded():
            runtime.receive()
        laid_out = runtime.export_initial_weights(self.crew._batch)
        load = LoadWeights(laid_out.version, laid_out.weights)
        runtime.ask([(worker, load) for worker in runtime.generator_workers()])
        rehearsal = Calibration(tuple({slice_size: 0.01} for _ in lanes), 0.002, 0.001, 0.001, pack_size=4)
        return initial_scheduler_state(runtime, rehearsal, slice_size)
