"""One training run from the first file to the last: opens it, drives it, and leaves nothing behind but its folder.

This is the driver. It handles ids, times and numbers, and needs no torch but in mode colocated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from digenrl.config.recipe import Recipe
from digenrl.config.recipe_files import fingerprint
from digenrl.console.live_view import RunView
from digenrl.driver.backends import find_backend
from digenrl.driver.calibration import (
    calibrate,
    calibrate_rest,
    choose_slice_size,
    export_initial_weights,
    initial_scheduler_state,
)
from digenrl.driver.dispatcher import Dispatcher
from digenrl.driver.prompt_store import PromptStore
from digenrl.loop import drive
from digenrl.metrics.sinks import check_logging, open_sinks
from digenrl.metrics.step_metrics import StepMetrics
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import read_prompts
from digenrl.run_folder.folder import LaneEntry, RunFolder, RunLines, Status
from digenrl.run_folder.journal import Journal
from digenrl.run_folder.lane_entries import LaneRecorder, lanes_of_whole_run
from digenrl.run_folder.spans import SpanWriter
from digenrl.runs.checkpointer import Checkpointer, RunPosition
from digenrl.runs.held_out import HeldOut
from digenrl.runs.replaying import opening_facts
from digenrl.runs.resuming import ResumePoint, kept_positions
from digenrl.runs.step_time_prediction import StepTimePrediction
from digenrl.runs.stopping import Stopper, StopRequested
from digenrl.scheduling import SchedulerState
from digenrl.scheduling.invariants import Auditor
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import TRAINER_LANE
from digenrl.transports.contract import Backend, RunResources


class RunClock:
    """Nanoseconds of the run: it begins at 0, or where a run that goes on had come to, when `start` is called."""

    def __init__(self, start_ns: int = 0) -> None:
        self._start_ns = start_ns
        self._zero_ns: int | None = None

    def __call__(self) -> int:
        return self._start_ns if self._zero_ns is None else self._start_ns + time.monotonic_ns() - self._zero_ns

    def start(self) -> None:
        """From now on it runs."""
        self._zero_ns = time.monotonic_ns()


def check_recipe(recipe: Recipe) -> Backend:
    """Finds everything that can be found wrong without loading a model; returns what there is to work on."""
    check_logging(recipe.logging)
    read_prompts(recipe.prompts)
    if recipe.evaluation is not None:
        read_prompts(recipe.evaluation.prompts)
    return find_backend(recipe)


def train(folder: RunFolder, grounds: Backend, view: RunView, standing: ResumePoint | None = None) -> Status:
    """Trains to the recipe's last step, or until somebody asks to stop; a stopped run saves itself first."""
    with ExitStack() as stack:
        stack.enter_context(folder.locked())
        stack.enter_context(_status_kept(folder))
        site = grounds.settle(folder.recipe, folder.path, None if standing is None else standing.checkpoint)
        stack.callback(site.close)
        stack.enter_context(view)
        run = TrainingRun(folder, site, view, standing)
        stack.callback(run.close)
        status = run.run()
        folder.set_status(status)
    return status


class TrainingRun:
    """The parts of one run and how they are connected; `run` is its story."""

    def __init__(
        self,
        folder: RunFolder,
        site: RunResources,
        view: RunView,
        standing: ResumePoint | None,
    ) -> None:
        recipe = folder.recipe
        self._folder, self._view, self._standing = folder, view, standing
        self._lines = RunLines(folder)
        if standing is None:
            self._lines.clear()
            self._start = RunPosition(0, 0, 0, self._lines.positions())
        else:
            self._start = standing.position
            self._lines.truncate(kept_positions(folder, standing.position))
        self._clock, self._stopper = RunClock(self._start.at_ns), Stopper()
        self._sampler = PromptSampler(
            read_prompts(recipe.prompts), recipe.batch.prompts, recipe.seed, recipe.prompts.shuffle
        )
        self._runtime = Dispatcher(
            recipe,
            site.transport,
            site.crew,
            lambda send, drop: PromptStore(self._sampler, send, drop),
            site.exchange,
            self._clock,
            look_around=self._look_around,
            on_step=lambda numbers: self._metrics.report(numbers.step, {**numbers.values, **site.carried()}),
            say=view.notify,
        )
        self._sinks = (*open_sinks(folder, self._lines, self._start.step, time.time), view)
        self._metrics: StepMetrics

    def run(self) -> Status:
        """Open, drive, close."""
        with self._stopper.listening():
            try:
                state = self._open()
            except StopRequested:
                return Status.INTERRUPTED  # before the first step of this process: there is nothing to save
            return self._drive(state)

    def close(self) -> None:
        """Closes all files."""
        for sink in self._sinks:
            sink.close()
        self._lines.close()

    def _open(self) -> SchedulerState:
        """Everybody is there, has the same version and was timed; the recipe's last open question is settled."""
        runtime, folder = self._runtime, self._folder
        self._view.notify(f"starting {len(runtime.crew.everybody())} workers")
        runtime.start_everybody()
        for step in range(self._start.step, min(self._start.step + 2, folder.recipe.steps)):
            runtime.desk.open_step(step)
        while not runtime.desk.all_encoded():
            runtime.receive()
        published_s = export_initial_weights(runtime, self._start.step)
        self._view.notify("rehearsing, to know what things cost")
        rehearsal = calibrate(runtime, published_s, self._start.step, self._view.notify)
        slice_size = choose_slice_size(runtime, rehearsal)
        rehearsal = calibrate_rest(runtime, rehearsal, slice_size, self._start.step)
        batch = folder.recipe.batch.model_copy(update={"slice": slice_size})
        folder.write_recipe(folder.recipe.model_copy(update={"batch": batch}))
        start = self._start
        state = initial_scheduler_state(
            runtime, rehearsal, slice_size, committed=start.step, leases_issued=start.leases_issued
        )
        opening = opening_facts(state) | {"rehearsal": asdict(rehearsal)}
        lanes = self._lanes()
        if self._standing is not None:
            lanes = lanes_of_whole_run(folder.info.lanes, lanes, start.at_ns)
        folder.update_info(lanes=lanes, initial_state=opening, status=Status.RUNNING)
        return state

    def _drive(self, state: SchedulerState) -> Status:
        start_ns = self._start.at_ns
        self._metrics = StepMetrics(state, self._sinks, start_ns)
        spans = SpanWriter(self._lines.spans, self._metrics.add_span)
        recorder = Recorder(state, start_ns=start_ns, sink=spans.add)
        foresight = StepTimePrediction(
            lambda step, seconds: self._metrics.report(step, {"predicted_step_s": seconds})
        )
        held_out = HeldOut(
            self._folder, self._runtime, self._clock, self._metrics.evaluated, recorder.add_span, self._view.notify
        )
        keeper = Checkpointer(
            self._folder, self._lines, self._runtime, self._start, self._facts, recorder.add_span
        )
        try:
            held_out.prepare(state.committed)
            self._view.notify("")
            self._clock.start()
            self._runtime.begin()
            journal = Journal(self._lines.journal)
            observers = (
                recorder,
                self._metrics,
                journal,
                Auditor(state),
                foresight,
                self._view,
                LaneRecorder(self._folder, self._runtime.lane_devices),
                keeper,
                held_out,
            )
            drive(state, self._runtime, observers)
            keeper.save_now()
            held_out.finish()
        except StopRequested as asked:
            self._view.notify(f"{asked}: saving step {keeper.bookmark.step}")
            keeper.save_now()
            if keeper.bookmark.step < self._folder.recipe.steps:
                return Status.INTERRUPTED
        return Status.FINISHED

    def _look_around(self) -> None:
        self._view.tick()
        if not self._runtime.committing:
            self._stopper.check()

    def _facts(self, bookmark: RunPosition) -> dict[str, object]:
        return bookmark.facts(fingerprint(self._folder.recipe))

    def _lanes(self) -> tuple[LaneEntry, ...]:
        """Every row that the trace will have, and its device."""
        crew = self._runtime.crew
        rows = [LaneEntry(name=g.name, pool="generator", device=g.device) for g in crew.generators]
        if not crew.generators:
            rows = [LaneEntry(name=self._runtime.lane_names()[0], pool="generator", device=crew.trainer.device)]
        rows += [LaneEntry(name=r.name, pool="reward", device=r.device) for r in crew.rewards]
        rows.append(LaneEntry(name=TRAINER_LANE, pool="trainer", device=crew.trainer.device))
        helpers = self._runtime.lane_names()[len(crew.generators) or 1 :]
        rows += [LaneEntry(name=name, pool="trainer", device=crew.trainer.device) for name in helpers]
        return tuple(rows)


@contextmanager
def _status_kept(folder: RunFolder) -> Iterator[None]:
    """A run that ends by an error says so in its folder."""
    try:
        yield
    except KeyboardInterrupt:
        folder.set_status(Status.INTERRUPTED)
        raise
    except BaseException:
        folder.set_status(Status.FAILED)
        raise
