"""One training run from its first file to its last: starts the workers, drives the scheduler, closes everything.

This is the driver's main program. It handles ids, times and numbers, and imports torch only in mode colocated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace

from digenrl.config.recipes.recipe import Recipe
from digenrl.console.live_view import RunView
from digenrl.driver.backends import find_backend
from digenrl.driver.calibration import (
    calibrate,
    calibrate_remaining_sizes,
    choose_slice_size,
    publish_initial_weights,
    schedule_facts,
)
from digenrl.driver.dispatcher import Dispatcher, RunHooks
from digenrl.driver.forwards import MeasuredForwards, measure_forwards
from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.step_summary import StepSummary
from digenrl.logs import configure_logging
from digenrl.loop import drive
from digenrl.metrics.flop_use import SampleOperations
from digenrl.metrics.sinks import check_logging, open_sinks
from digenrl.metrics.step_metrics import StepMetrics
from digenrl.prompts.checks import check_prompts, held_out_prompts
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.source_images import shown_source
from digenrl.prompts.sources import Prompt, read_prompts
from digenrl.records import HELD_OUT_STEP
from digenrl.rewards.packages import check_packages
from digenrl.run_folder.folder import LaneEntry, RunFolder, RunLines, Status
from digenrl.run_folder.grids import write_source_grid
from digenrl.run_folder.journal import Journal
from digenrl.run_folder.lane_entries import LaneRecorder, lanes_of_whole_run
from digenrl.run_folder.metric_lines import EvaluationRecord
from digenrl.run_folder.spans import SpanWriter
from digenrl.runs.checkpointer import Checkpointer, RunPosition
from digenrl.runs.held_out import HeldOut, unfinished_evaluations
from digenrl.runs.initial_facts import RECORDED, initial_facts
from digenrl.runs.resuming import ResumePoint, kept_positions, steps_to_repeat
from digenrl.runs.step_time_prediction import StepTimePrediction
from digenrl.runs.stopping import Stopper, StopRun
from digenrl.scheduling import SchedulerState, initial_state
from digenrl.scheduling.invariants import Auditor
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import TRAINER_LANE
from digenrl.transports.contract import Backend, RunResources
from digenrl.worker.assignment import TRAINER

logger = logging.getLogger(__name__)


class RunClock:
    """Nanoseconds of the run. From `start` on it counts from 0, or from where a resumed run had stopped."""

    def __init__(self, start_ns: int = 0) -> None:
        self._start_ns = start_ns
        self._zero_ns: int | None = None

    def __call__(self) -> int:
        return self._start_ns if self._zero_ns is None else self._start_ns + time.monotonic_ns() - self._zero_ns

    def start(self) -> None:
        self._zero_ns = time.monotonic_ns()


def check_recipe(recipe: Recipe) -> Backend:
    """Finds every mistake that can be found without loading a model. Returns the hardware to train on."""
    check_logging(recipe.logging)
    check_packages(recipe)
    for warning in check_prompts(recipe):
        logger.warning("%s", warning)
    return find_backend(recipe)


def train(folder: RunFolder, backend: Backend, view: RunView, resume_point: ResumePoint | None = None) -> Status:
    """Trains to the recipe's last step, or until the user asks to stop; then the run saves itself first."""
    with ExitStack() as stack:
        stack.enter_context(folder.locked())
        stack.enter_context(_failure_recorded(folder))
        folder.logs.mkdir(exist_ok=True)
        configure_logging("driver", verbose=folder.recipe.logging.verbose, file=folder.logs / "driver.log")
        checkpoint = None if resume_point is None else resume_point.checkpoint
        recipe = folder.recipe if checkpoint is None else folder.recipe.from_checkpoint()
        resources = backend.prepare(recipe, folder.path, checkpoint)
        stack.callback(resources.close)
        stack.enter_context(view)
        run = TrainingRun(folder, resources, view, resume_point)
        stack.callback(run.close)
        status = run.run()
        folder.set_status(status)
    return status


class TrainingRun:
    """The parts of one run and how they are connected. `run` tells its story."""

    def __init__(
        self, folder: RunFolder, resources: RunResources, view: RunView, resume_point: ResumePoint | None
    ) -> None:
        recipe = folder.recipe
        self._folder, self._resources, self._view = folder, resources, view
        self._resumes = resume_point is not None
        self._lines = RunLines(folder)
        if resume_point is None:
            self._lines.clear()
            self._start = RunPosition(0, 0, 0, self._lines.positions())
        else:
            self._start = replace(resume_point.position, recorded=steps_to_repeat(folder, resume_point.position))
            recorded = {RECORDED: [asdict(step) for step in self._start.recorded]}
            folder.update_info(initial_state=folder.info.initial_state | recorded)  # before the journal is cut
            self._lines.truncate(kept_positions(folder, self._start))
        self._clock, self._stopper = RunClock(self._start.at_ns), Stopper()
        sampler = PromptSampler(
            read_prompts(recipe.prompts), recipe.batch.prompts, recipe.seed, recipe.prompts.shuffle
        )
        held_out = list(held_out_prompts(recipe))
        _write_sources(folder, held_out)
        prompts = PromptStore(sampler, resources.artifacts.drop, held_out)
        self._sinks = (*open_sinks(folder, self._lines, self._start.step, time.time), view)
        self._checkpointer = Checkpointer(folder, self._lines, self._start)
        self._held_out = HeldOut(folder, prompts.held_out, self._start.step, self._evaluated, self._not_evaluated)
        self._metrics: StepMetrics | None = None
        self._operations: SampleOperations | None = None
        hooks = RunHooks(
            poll=self._poll,
            on_step=self._step_done,
            notify=view.notify,
            checkpoint_facts=self._checkpointer.facts,
        )
        self._driver = Dispatcher(recipe, resources, prompts, self._clock, hooks)
        self._begun = self._warned = False

    def run(self) -> Status:
        """Prepare, then drive the scheduler until the run is finished or stopped."""
        with self._stopper.listening():
            try:
                state = self._prepare()
            except StopRun:
                return Status.INTERRUPTED  # no step was taken by this process: there is nothing to save
            state = self._drive(state)
        return Status.FINISHED if state.all_committed and not state.evaluations else Status.INTERRUPTED

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._lines.close()

    def _prepare(self) -> SchedulerState:
        """Starts and times the workers, gives them the same version, and chooses the slice size."""
        driver, folder, start = self._driver, self._folder, self._start
        self._view.notify(f"starting {len(driver.stores.workers.initial())} workers")
        driver.start_workers()
        first_step = min(start.step, folder.recipe.steps - 1)  # all steps may be done, except for an evaluation
        for step in range(first_step, min(start.step + 2, folder.recipe.steps)):
            driver.encode_now(step)
        driver.encode_now(HELD_OUT_STEP)
        unfinished = unfinished_evaluations(folder, folder.recipe, start)
        one_behind = start.repeats_stale_samples or start.step - 1 in unfinished
        weights = publish_initial_weights(driver, start.step, one_behind=one_behind)
        forwards = measure_forwards(driver, first_step, self._view.notify)
        self._operations = _operations(driver, forwards)
        self._view.notify("calibrating: timing generation, scoring and training")
        calibration = calibrate(driver, weights.publish_s, first_step, self._view.notify)
        slice_size = choose_slice_size(driver, calibration)
        calibration = calibrate_remaining_sizes(driver, calibration, slice_size, first_step)
        logger.info("calibrated: %s; slice size %d", calibration, slice_size)
        folder.write_recipe(_settled(folder.recipe, slice_size, forwards))
        evaluations = tuple(version for version in unfinished if version >= weights.version)
        state = initial_state(
            *schedule_facts(driver, calibration, slice_size),
            committed=start.step,
            jobs_issued=start.jobs_issued,
            evaluations=evaluations,
            served=weights.version,
            recorded=start.recorded,
        )
        lanes = self._lanes()
        if self._resumes:
            lanes = lanes_of_whole_run(folder.info.lanes, lanes, start.at_ns)
        initial = initial_facts(state) | {"calibration": asdict(calibration)}
        folder.update_info(lanes=lanes, initial_state=initial, status=Status.RUNNING)
        for version in unfinished[: len(unfinished) - len(evaluations)]:
            left_out = (
                f"the evaluation after {version} steps was interrupted, and its weights were not saved: left out"
            )
            logger.warning("%s", left_out)
            self._view.notify(left_out)
        evaluated = f"the policy after {evaluations[0]} steps" if any(evaluations) else "the initial policy"
        self._view.notify(f"evaluating {evaluated}" if evaluations else "")
        return state

    def _drive(self, state: SchedulerState) -> SchedulerState:
        start_ns = self._start.at_ns
        self._metrics = metrics = StepMetrics(state, self._sinks, start_ns, self._operations)
        spans = SpanWriter(self._lines.spans, metrics.add_span)
        prediction = StepTimePrediction(lambda step, seconds: metrics.report(step, {"predicted_step_s": seconds}))
        observers = (
            # first, so that the cause of every entry in the other files is in the journal
            Journal(self._lines.journal),
            Recorder(state, start_ns=start_ns, sink=spans.add),
            metrics,  # after the recorder: a step ends with the span of its commit
            Auditor(state),
            prediction,
            self._view,
            LaneRecorder(self._folder, self._driver.stores.lanes.devices),
            self._held_out,
            self._checkpointer,  # after everything that writes files: it notes how long they are
        )
        self._clock.start()
        self._driver.begin()
        self._begun = True
        return drive(state, self._driver, observers)

    def _poll(self) -> None:
        self._view.tick()
        asked_by = self._stopper.take_request()
        if asked_by is None:
            return
        if not self._begun:
            raise StopRun(asked_by)
        logger.info("stopping: %s", asked_by)
        self._view.notify(f"{asked_by}: saving step {self._checkpointer.position.step}")
        self._driver.request_stop()

    def _step_done(self, summary: StepSummary) -> None:
        assert self._metrics is not None
        if summary.warning and not self._warned:
            self._warned = True
            logger.warning("step %d: %s", summary.step, summary.warning)
            self._view.notify(f"step {summary.step}: {summary.warning}")
        self._metrics.report(summary.step, {**summary.values, **self._resources.network_metrics()})

    def _evaluated(self, evaluation: EvaluationRecord) -> None:
        assert self._metrics is not None
        self._view.notify("")
        self._metrics.evaluated(evaluation)

    def _not_evaluated(self, version: int, reason: str) -> None:
        assert self._metrics is not None
        self._view.notify(reason)
        self._metrics.report(version, {"failed_evaluation": version})

    def _lanes(self) -> tuple[LaneEntry, ...]:
        """Every row of the trace, and its device."""
        workers, lanes = self._driver.stores.workers, self._driver.stores.lanes
        count = len(workers.generators) or 1  # the other lanes are the trainer's helpers
        generators, helpers = lanes.names[:count], lanes.names[count:]
        rows = [LaneEntry(name=name, pool="generator", device=lanes.devices[name]) for name in generators]
        rows += [LaneEntry(name=r.name, pool="reward", device=r.device) for r in workers.rewards]
        rows.append(LaneEntry(name=TRAINER_LANE, pool="trainer", device=workers.trainer.device))
        rows += [LaneEntry(name=name, pool="trainer", device=lanes.devices[name]) for name in helpers]
        return tuple(rows)


def _operations(driver: Dispatcher, forwards: MeasuredForwards) -> SampleOperations:
    """The operations of a sample, and the rates of all lanes. That of the trainer's is the sum of its ranks."""
    lanes, rates, counts = driver.stores.lanes, forwards.matrix_tflops, driver.stores.recipe.lanes
    own = {name: rates.get(lanes.worker(lane), rates[TRAINER]) for lane, name in enumerate(lanes.names)}
    trainer = rates[TRAINER] * counts.ranks / counts.cards_per_replica
    return SampleOperations(forwards.generate_flop, forwards.train_flop, own | {TRAINER_LANE: trainer})


def _settled(recipe: Recipe, slice_size: int, forwards: MeasuredForwards) -> Recipe:
    """The recipe with what calibration has chosen, so that a resumed run rounds as this one."""
    model = recipe.model
    if forwards.kernels is not None:
        model = model.model_copy(update={"attention": dict(forwards.kernels)})
    batch = recipe.batch.model_copy(update={"slice": slice_size})
    return recipe.model_copy(update={"batch": batch, "model": model})


def _write_sources(folder: RunFolder, held_out: Sequence[Prompt]) -> None:
    """Shows the source images of held-out prompts, if they have any, in the order of the samples' grids."""
    recipe, evaluation = folder.recipe, folder.recipe.evaluation
    if evaluation is None or not any(prompt.images for prompt in held_out):
        return
    height, width, _ = recipe.held_out_size
    shown = held_out[: evaluation.shown]
    write_source_grid(folder, [shown_source(prompt, height, width, recipe.sample.source_size) for prompt in shown])


@contextmanager
def _failure_recorded(folder: RunFolder) -> Iterator[None]:
    """A run that ends with an error says so in its folder."""
    try:
        yield
    except KeyboardInterrupt:
        folder.set_status(Status.INTERRUPTED)
        raise
    except BaseException:
        folder.set_status(Status.FAILED)
        raise
