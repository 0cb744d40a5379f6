"""Workers without models, to test the driver: they follow the rules of real ones, in a random order.

Files in the exchange are empty but real: a job fails if it reads one that is missing. Workers do one job at a
time, several of them may answer at once, and dice may end one at any moment.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import fake_recipes
from PIL import Image

from digenrl.chaos.workers import UPDATE
from digenrl.config.recipes.recipe import Recipe
from digenrl.driver.calibration import Calibration, publish_initial_weights, schedule_facts
from digenrl.driver.dispatcher import Dispatcher, RunHooks
from digenrl.driver.placement import place
from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.step_summary import StepSummary
from digenrl.exchange.folder import ExchangeFolder
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt
from digenrl.records import (
    HELD_OUT_STEP,
    NO_WEIGHTS,
    Calibrate,
    Calibrated,
    Commit,
    Committed,
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Export,
    Exported,
    Generate,
    Generated,
    Job,
    JobFailed,
    Publish,
    Published,
    Restore,
    Restored,
    RoleSwitched,
    Save,
    Saved,
    Score,
    Scored,
    Scores,
    SwitchRole,
    Train,
    Trained,
    WeightsReference,
    held_out_name,
    pixels_name,
    slice_name,
    weights_name,
)
from digenrl.scheduling import SchedulerState, initial_state
from digenrl.transports.contract import Gone, InputsLost, Message, Report, RunResources
from digenrl.worker.assignment import TRAINER, Assignment, Machine, Ready, StartFailed, Workers

STARTING = None  # stands for the job of starting


def fake_recipe(**changes: Any) -> Recipe:
    """A recipe that saves every second step, with some of its keys changed."""
    return fake_recipes.fake_recipe(**changes | {"checkpoint": {"every": 2, **changes.get("checkpoint", {})}})


@dataclass
class _FakeWorker:
    assignment: Assignment
    jobs: dict[int | None, Job | None] = field(default_factory=dict)  # by id; None is the start
    version: int = 0


class FakeTransport:
    """`fails` says why a job fails, if it does; `hangs` whether it never ends.

    Dice end `kills` workers and lose artifacts `vanishing` times.
    """

    def __init__(
        self,
        exchange: ExchangeFolder,
        dice: random.Random,
        *,
        kills: int = 0,
        fails: Callable[[Job], str | None] = lambda job: None,
        hangs: Callable[[Job], bool] = lambda job: False,
        mortal_trainer: bool = False,
        vanishing: int = 0,
    ) -> None:
        self._exchange, self._dice, self._fails, self._hangs = exchange, dice, fails, hangs
        self.kills_left, self.vanishing_left = kills, vanishing
        self._mortal_trainer = mortal_trainer
        self._vanished: set[str] = set()
        self.no_room_for: set[str] = set()
        self.loads_forever: set[str] = set()
        self.fails_to_start: dict[str, StartFailed] = {}
        self.workers: dict[str, _FakeWorker] = {}
        self.trained: list[tuple[int, tuple[int, ...]]] = []  # step, then the place and samples of a group
        self.log: list[tuple[str, Job]] = []  # what was answered
        self.trainer_version = self._committed = 0
        self.waiting: deque[Message] = deque()
        self._carry_out: dict[type[Job], Callable[[_FakeWorker, Any], Report]] = {
            Encode: self._encode,
            Generate: self._generate,
            Score: self._score,
            Train: self._train,
            Commit: self._commit,
            Publish: self._publish,
            Export: self._export,
            Restore: self._restore,
            SwitchRole: lambda worker, job: RoleSwitched(0, job),
            Evaluate: self._evaluate,
            Save: self._save,
            Calibrate: lambda worker, job: Calibrated(0, job, dict.fromkeys(job.sizes, 0.01)),
        }

    # --- Transport ----------------------------------------------------------------------------------------------

    def start(self, assignment: Assignment) -> None:
        assert assignment.name not in self.workers, f"{assignment.name} was started twice"
        self.workers[assignment.name] = _FakeWorker(assignment, {None: STARTING})

    def send(self, worker: str, job: Job) -> None:
        if worker in self.workers:
            self.workers[worker].jobs[job.id] = job

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """Prepared messages, or the answers of some of the busy workers, one each."""
        if not self.waiting:
            busy = [name for name, worker in self.workers.items() if worker.jobs]
            assert busy, "no worker has a job: the run hangs"
            busy = [name for name in busy if not self._is_hanging(name)]
            for name in self._dice.sample(busy, self._dice.randint(1, len(busy))) if busy else ():
                self.answer(name)
            self._roll_dice()
        messages = list(self.waiting)
        self.waiting.clear()
        return messages

    def has_capacity(self, assignment: Assignment) -> bool:
        return assignment.name not in self.no_room_for

    def end(self, worker: str) -> None:
        """The trainer ends with its open gradient."""
        self.workers.pop(worker, None)
        if worker == TRAINER:
            self.trained = [each for each in self.trained if each[0] < self._committed]
            self.trainer_version = 0  # a replacement starts from scratch, unless it restores a version

    def stop(self) -> None:
        self.workers.clear()

    # --- For tests ----------------------------------------------------------------------------------------------

    def answer(self, name: str, count: int = 1) -> None:
        """Carries out the worker's oldest jobs; the results wait for `receive`."""
        for _ in range(count):
            worker = self.workers[name]
            job_id = next(iter(worker.jobs))
            job = worker.jobs.pop(job_id)
            if job is None:
                self.waiting.append(Message(name, None, self.fails_to_start.get(name, Ready())))
                continue
            self.log.append((name, job))
            self.waiting.append(Message(name, job_id, self._result(worker, job)))

    def kill(self, name: str) -> None:
        """Ends a worker with its jobs, of which the driver hears."""
        assert name in self.workers, f"{name} is not there"
        self.end(name)
        self.waiting.append(Message(name, None, Gone("ended by signal 9 (SIGKILL)")))

    def vanish(self, *names: str) -> None:
        """These artifacts are lost with a machine. The trainer's state has a copy elsewhere."""
        for name in names:
            if not name.startswith("state-"):
                self._exchange.drop(name)
                self._vanished.add(name)

    def kinds_of_jobs(self, name: str) -> list[type[Job] | None]:
        """What a worker has been sent and not answered; None stands for its start."""
        return [None if job is None else type(job) for job in self.workers[name].jobs.values()]

    def jobs(self, kind: type[Any]) -> list[Any]:
        """The answered jobs of one kind, in order."""
        return [job for _, job in self.log if isinstance(job, kind)]

    def _is_hanging(self, name: str) -> bool:
        oldest = next(iter(self.workers[name].jobs.values()))
        return name in self.loads_forever if oldest is None else self._hangs(oldest)

    def _roll_dice(self) -> None:
        mortal = [name for name in self.workers if name != TRAINER or self._mortal_trainer]
        if self.kills_left and self._dice.random() < 0.08:
            self.kills_left -= 1
            self.kill(self._dice.choice(mortal))
        if self.vanishing_left and self._dice.random() < 0.1:
            self.vanishing_left -= 1
            self.vanish(*(name for name in self._exchange.names() if self._dice.random() < 0.5))

    # --- What workers do ----------------------------------------------------------------------------------------

    def _result(self, worker: _FakeWorker, job: Job) -> Report:
        reason = self._fails(job)
        if reason is not None:
            if isinstance(job, Generate):
                self._put(slice_name(job.id))  # it may fail half-way
            return JobFailed(0, job, reason, user_error=True)
        try:
            self._need(job.reads() if not isinstance(job, Publish) else ())
            return self._carry_out[type(job)](worker, job)
        except FileNotFoundError as error:
            lost = tuple(name for name in job.reads() if name in self._vanished)
            return InputsLost(lost) if lost else JobFailed(0, job, f"FileNotFoundError: {error}")

    def _put(self, *names: str) -> None:
        for name in names:
            self._exchange.path(name).touch()
            self._vanished.discard(name)

    def _need(self, names: Iterable[str]) -> None:
        for name in names:
            if not self._exchange.path(name).exists():
                raise FileNotFoundError(name)

    def _version(self, worker: _FakeWorker) -> int:
        return self.trainer_version if "train" in worker.assignment.duties else worker.version

    def _encode(self, worker: _FakeWorker, job: Encode) -> Report:
        self._put(*job.writes())
        return Encoded(0, job)

    def _generate(self, worker: _FakeWorker, job: Generate) -> Report:
        version, name, piece = self._version(worker), slice_name(job.id), job.slice
        assert piece.step - 1 <= version <= piece.step, f"{job} is generated with version {version}"
        assert version >= job.version, f"{job} needs weights that were never loaded"
        self._put(name)
        if "score" in worker.assignment.duties:
            return Generated(0, job, version, scores=_scores(piece.size))
        self._put(pixels_name(name))
        return Generated(0, job, version)

    def _score(self, worker: _FakeWorker, job: Score) -> Report:
        assert "score" in worker.assignment.duties
        return Scored(0, job, _scores(len(job.prompts)))

    def _train(self, worker: _FakeWorker, job: Train) -> Report:
        group = job.group
        assert {piece.slice.step for piece in group.slices} == {self.trainer_version}
        samples = tuple(sample.index for piece in group.slices for sample in piece.slice.samples())
        assert samples == tuple(range(len(group.rewards)))
        self.trained.append((self.trainer_version, (group.place, *samples)))
        return Trained(0, job)

    def _commit(self, worker: _FakeWorker, job: Commit) -> Report:
        assert job.step == self.trainer_version
        self.trainer_version = self._committed = job.step + 1
        self._put(*job.writes())
        return Committed(0, job, (UPDATE,), self._reference())

    def _export(self, worker: _FakeWorker, job: Export) -> Report:
        if job.version != self.trainer_version:
            return Exported(0, job, NO_WEIGHTS)
        self._put(*job.writes())
        return Exported(0, job, self._reference())

    def _reference(self) -> WeightsReference:
        return WeightsReference(weights_name(self.trainer_version), 100, 7)

    def _restore(self, worker: _FakeWorker, job: Restore) -> Report:
        self.trainer_version = job.version
        return Restored(0, job)

    def _publish(self, worker: _FakeWorker, job: Publish) -> Report:
        if job.version > worker.version:
            self._need(job.reads())
            worker.version = job.version
        return Published(0, job, job.lanes, 0.001)

    def _evaluate(self, worker: _FakeWorker, job: Evaluate) -> Report:
        version = self._version(worker)
        assert version == job.chunk.version, f"{job} is sampled with version {version}"
        pictures = tuple((f"{job.first + row:04d}.png", _picture()) for row in range(len(job.prompts)))
        if "score" in worker.assignment.duties:
            return Evaluated(0, job, _scores(len(job.prompts), job.first), pictures)
        self._put(held_out_name(job.chunk))
        return Evaluated(0, job, pictures=pictures)

    def _save(self, worker: _FakeWorker, job: Save) -> Report:
        assert job.step == self.trainer_version, f"{job} while the trainer is at {self.trainer_version}"
        return Saved(0, job, f"step_{job.step:06d}")


@cache
def _picture() -> bytes:
    file = BytesIO()
    Image.new("RGB", (2, 2)).save(file, format="PNG")
    return file.getvalue()


def _scores(count: int, first: int = 0) -> Scores:
    values = tuple(float(first + index) for index in range(count))
    return Scores(values, {"size": values})


def with_reserve(workers: Workers, count: int) -> Workers:
    """The workers, and generators that may join."""
    names = (f"generator-{len(workers.generators) + index}" for index in range(count))
    return replace(workers, reserve=tuple(replace(workers.generators[0], name=name) for name in names))


def in_pools(workers: Workers, pools: Sequence[str]) -> Workers:
    """The workers, with their generators in these pools, one after the other."""
    names = (*pools, *[None] * (len(workers.generators) - len(pools)))
    placed = tuple(replace(each, pool=pool) for each, pool in zip(workers.generators, names, strict=True))
    return replace(workers, generators=placed)


class FakeRun:
    """A dispatcher with fake workers, and a clock that advances by a millisecond whenever it is read."""

    def __init__(
        self,
        root: Path,
        recipe: Recipe,
        *,
        seed: int = 0,
        prompts: int = 5,
        held_out: int = 0,
        kept_rows: int = 1024,
        reserve: int = 0,
        pools: Sequence[str] = (),
        edits: bool = False,
        hooks: Mapping[str, Any] | None = None,
        **faults: Any,
    ) -> None:
        self.exchange = ExchangeFolder(root)
        self.transport = FakeTransport(self.exchange, random.Random(seed), **faults)
        self.steps: list[StepSummary] = []
        self.messages: list[str] = []
        self._ns = 0
        images = (_picture(),) if edits else ()
        sampler = PromptSampler(
            [Prompt(index, f"prompt {index}", images=images) for index in range(prompts)],
            recipe.batch.prompts,
            recipe.seed,
        )
        store = PromptStore(
            sampler,
            self.exchange.drop,
            [Prompt(index, f"held out {index}") for index in range(held_out)],
            kept_rows,
        )
        workers = in_pools(with_reserve(place(recipe, Machine((0, 1, 2)), root), reserve), pools)
        resources = RunResources(self.transport, self.exchange, workers, lambda: None)
        all_hooks = {
            "on_step": self.steps.append,
            "notify": self.messages.append,
            **(hooks or {}),
        }
        self.driver = Dispatcher(recipe, resources, store, self.clock, RunHooks(**all_hooks))

    def clock(self) -> int:
        """Advances by a millisecond."""
        self._ns += 1_000_000
        return self._ns

    def prepare(self, slice_size: int = 2, **initial: Any) -> SchedulerState:
        """As a run is prepared, with made-up costs."""
        driver = self.driver
        driver.start_workers()
        for step in range(min(2, driver.stores.recipe.steps)):
            driver.encode_now(step)
        driver.encode_now(HELD_OUT_STEP)
        publish_initial_weights(driver, self.transport.trainer_version)
        slices = tuple({slice_size: 0.01} for _ in driver.stores.lanes.names)
        calibration = Calibration(slices, 0.002, 0.001, 0.001, pack_size=4)
        return initial_state(*schedule_facts(driver, calibration, slice_size), **initial)


def is_slice(name: str) -> bool:
    """Whether an artifact belongs to a slice."""
    return name.startswith("slice-")


def begun(tmp_path: Path, **changes: Any) -> FakeRun:
    """A run after its first tick."""
    run = FakeRun(tmp_path, fake_recipe(**changes), prompts=20)
    run.prepare()
    run.driver.begin()
    assert run.driver.next_event()  # the first tick
    return run
