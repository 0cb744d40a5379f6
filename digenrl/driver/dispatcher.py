"""The driver's dispatcher: jobs go to workers with their inputs filled in, and results come back as events.

It works with any transport, handles names and numbers but never tensors, and needs no torch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.driver.cost_tracker import CostTracker, timed_offer
from digenrl.driver.lanes import LaneTable
from digenrl.driver.pending_jobs import CompletedJob, PendingJobs
from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.sample_store import SampleStore
from digenrl.driver.step_summary import StepSummary, step_summary
from digenrl.driver.supervisor import Supervisor, TrainerLostError, WorkerFailedError
from digenrl.driver.weight_versions import WeightVersions
from digenrl.logs import describe
from digenrl.records import (
    HELD_OUT_STEP,
    AbandonEvaluation,
    Action,
    ArtifactLost,
    Calibrate,
    Calibrated,
    Commit,
    Committed,
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Event,
    Export,
    Exported,
    Generate,
    Generated,
    HeldOutChunk,
    Job,
    JobFailed,
    LaneOffer,
    PromptRow,
    Publish,
    Published,
    Quarantine,
    Restore,
    Result,
    RoleSwitched,
    Save,
    Saved,
    Score,
    Scored,
    SliceArtifact,
    StopRequested,
    SwitchRole,
    Tick,
    Train,
    Trained,
    Wait,
    WorkerJoined,
    WorkerLost,
    WorkerRestarted,
    held_out_name,
    pixels_name,
    slice_name,
)
from digenrl.transports.contract import Gone, InputsLost, Message, RunResources
from digenrl.worker.assignment import ENCODER, TRAINER, Ready, StartFailed, own_slice, rank_names

logger = logging.getLogger(__name__)

RECEIVE_TIMEOUT_S = 0.25  # how long to wait for messages before `look_around` is called again
NO_FACTS: dict[str, Any] = {}
AnyResult = TypeVar("AnyResult", bound=Result)


@dataclass(frozen=True, slots=True)
class RunHooks:
    """What a run adds to its dispatcher.

    `look_around` is called several times a second and may raise. `on_step` gets the numbers of every committed
    step. `notify` shows a message to the user. `checkpoint_facts` describes a step for its checkpoint, and
    `pictures` is where the pictures of a version's evaluation go.
    """

    look_around: Callable[[], None] = lambda: None
    on_step: Callable[[StepSummary], None] = lambda summary: None
    notify: Callable[[str], None] = lambda message: None
    checkpoint_facts: Callable[[int], Mapping[str, Any]] = lambda step: NO_FACTS
    pictures: Callable[[int], Path] = lambda version: Path()


class Dispatcher:
    """Carries out the scheduler's jobs with workers.

    Before `begin`, jobs are sent by `ask`, and a lost worker is simply replaced. From then on the scheduler hears
    of every loss and issues again what was lost.
    """

    def __init__(
        self,
        recipe: Recipe,
        resources: RunResources,
        prompts: PromptStore,
        clock: Callable[[], int],
        hooks: RunHooks | None = None,
    ) -> None:
        self.recipe, self.workers, self.artifacts = recipe, resources.workers, resources.artifacts
        self.prompts, self._clock, self._hooks = prompts, clock, hooks or RunHooks()
        self._jobs = PendingJobs(resources.transport, clock)
        self._supervisor = Supervisor(
            self.workers, self._jobs, recipe.lanes.restarts, time.monotonic, self._hooks.notify
        )
        self.lanes = LaneTable(self.workers)
        self._samples = SampleStore()
        self.versions = WeightVersions(recipe, self.artifacts)
        self.costs: CostTracker | None = None
        self._slice_size = 0
        self._events: deque[Event] = deque()
        self._now_ns = clock()
        self._ticked, self._begun = True, False
        self._own_ids = count(-1, -1)  # of jobs that the scheduler does not issue
        self._callbacks: dict[int, Callable[[Any], None]] = {}  # for results of those jobs
        self._starting: set[str] = set()
        self._unheard_losses: Counter[str] = Counter()  # lost workers of which the scheduler has yet to hear
        self._returning: dict[str, int] = {}  # the lane that a generator had before it was lost
        self._parked: list[Job] = []  # until their prompts are encoded
        self._abandoned: set[int] = set()  # versions whose evaluation was abandoned
        self._updates: list[Mapping[str, Any]] = []
        self._publish_s = 0.0

    # --- The loop's side ----------------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """The next event; after all events of an instant, a tick; then waits for messages."""
        while not self._events:
            if not self._ticked:
                self._ticked = True
                return Tick(self._now_ns)
            self.receive()
        event = self._events.popleft()
        if isinstance(event, WorkerLost):
            self._hear_of_loss(event)
        return event

    def submit(self, action: Action) -> None:
        """Sends a job to its workers, with its inputs."""
        self._SUBMIT[type(action)](self, action)

    def use_costs(self, costs: CostTracker, slice_size: int) -> None:
        """Results are measured from now on."""
        self.costs, self._slice_size = costs, slice_size

    def begin(self) -> None:
        """The scheduler takes over. The first tick hands out work, and reserve generators may join."""
        assert self.costs is not None, "a run begins after its calibration"
        self._now_ns, self._ticked, self._begun = self._clock(), False, True
        for assignment in self.workers.reserve:
            self._supervisor.want(assignment.name)

    def request_stop(self) -> None:
        """The user asked the run to save and stop."""
        self._ticked = False
        self._events.append(StopRequested(self._now_ns))

    def receive(self) -> None:
        """Handles the messages that have arrived; waits briefly if there are none."""
        self._hooks.look_around()  # it may raise, so before any message is taken
        messages = self._jobs.transport.receive(RECEIVE_TIMEOUT_S)
        if messages:  # all belong to one instant: the arrival of the last of them
            waited_ns = min(message.waited_ns for message in messages)
            self._now_ns = max(self._now_ns, self._clock() - waited_ns)
        for message in messages:
            self._handle(message)
        self._supervisor.look_for_room()

    # --- Before the run -----------------------------------------------------------------------------------------

    def start_workers(self) -> None:
        """Starts all workers and waits until they are ready."""
        self._starting = {each.name for each in self.workers.initial()}
        for name in [each.name for each in self.workers.initial()]:
            self._supervisor.want(name)
        self._supervisor.fill()
        while self._starting:
            self.receive()

    def ask(self, requests: Sequence[tuple[str, Job]]) -> list[Any]:
        """Sends jobs to several workers at once and waits for all their results, in the same order."""
        results: dict[int, Result] = {}  # by job id
        for worker, job in requests:
            self._send_own(worker, job, partial(results.__setitem__, job.id))
        while len(results) < len(requests):
            self.receive()
        return [results[job.id] for _, job in requests]

    def own_job_id(self) -> int:
        """An id for a job that the scheduler does not issue."""
        return next(self._own_ids)

    def encode_now(self, step: int) -> None:
        """Encodes the prompts of a step, or all held-out prompts, and waits for it."""
        missing = self.prompts.missing(step, self.prompts.groups(step))
        if missing:
            job = Encode(self.own_job_id(), self._clock(), step, self.prompts.groups(step), missing)
            self.ask([(self.encoder(), job)])

    def export_now(self, version: int) -> Exported:
        """Exports the trainer's version and waits for it."""
        exported: Exported = self.ask([(TRAINER, self._with_state(Export(self.own_job_id(), 0, version)))])[0]
        return exported

    def generator_workers(self) -> list[str]:
        """The workers that generate, helpers excluded: the generators, or the one worker that does everything."""
        return [each.name for each in self.workers.generators] or [TRAINER]

    def encoder(self) -> str:
        """The worker that encodes prompts."""
        return TRAINER if self.workers.encoder is None else ENCODER

    def reward_workers(self) -> list[str]:
        """The workers that only score; none if generators score what they make."""
        return [each.name for each in self.workers.rewards]

    # --- Jobs: fill in inputs, and send -------------------------------------------------------------------------

    def _encode(self, job: Encode) -> None:
        missing = self.prompts.missing(job.step, job.groups)
        if missing:
            self._send(self.encoder(), replace(job, prompts=missing))
        else:
            self._events.append(Encoded(self._now_ns, job))

    def _generate(self, job: Generate) -> None:
        worker = self.lanes.worker(job.lane)
        if worker:  # else the lane was lost, and the scheduler is about to hear it
            prompt = self.prompts.row(job.slice.step, job.slice.group)
            self._send_when_encoded(worker, replace(job, prompt=prompt), [prompt])

    def _score(self, job: Score) -> None:
        if isinstance(job.piece, HeldOutChunk):
            job = replace(job, prompts=self._chunk_prompts(job.piece))
        else:
            prompt = self.prompts.row(job.piece.step, job.piece.group)
            artifact = self._samples.artifact_of(job.piece)
            if artifact is None:  # just lost, which the scheduler is about to hear
                self._events.append(ArtifactLost(self._now_ns, job))
                return
            job = replace(job, artifact=artifact, prompts=(prompt,) * job.piece.size)
        self._send(self.workers.rewards[job.scorer].name, job)

    def _train(self, job: Train) -> None:
        prompt = self.prompts.row(job.slice.step, job.slice.group)
        group = self._samples.group_artifact(job.slice, prompt)
        if group is None:  # some of it was just lost, which the scheduler is about to hear
            self._events.append(ArtifactLost(self._now_ns, job))
            return
        self._send_when_encoded(TRAINER, replace(job, group=group), [prompt])

    def _commit(self, job: Commit) -> None:
        self._send(TRAINER, self._with_state(job))

    def _export(self, job: Export) -> None:
        self._send(TRAINER, self._with_state(job))

    def _restore(self, job: Restore) -> None:
        self._send(TRAINER, replace(job, sharded=self.recipe.sharded))

    def _publish(self, job: Publish) -> None:
        for lane in job.lanes:
            worker = self.lanes.worker(lane)
            if worker:
                self._send(worker, replace(job, lanes=(lane,), weights=self.versions.newest))

    def _switch_role(self, job: SwitchRole) -> None:
        self._send(TRAINER, job)

    def _evaluate(self, job: Evaluate) -> None:
        worker, settings = self.lanes.worker(job.lane), self.recipe.evaluation
        assert settings is not None
        if worker:
            prompts = self._chunk_prompts(job.chunk)
            filled = replace(
                job,
                first=job.chunk.index * settings.chunk,
                prompts=prompts,
                pictures=str(self._hooks.pictures(job.chunk.version)),
                shown=settings.shown,
            )
            self._send_when_encoded(worker, filled, prompts)

    def _save(self, job: Save) -> None:
        facts = self._hooks.checkpoint_facts(job.step)
        run, keep = self.workers.trainer.run, self.recipe.checkpoint.keep
        self._send(TRAINER, replace(job, run=str(run), facts=facts, keep=keep))

    def _quarantine(self, action: Quarantine) -> None:
        for artifact in self._samples.replace(action.step, action.group, action.replaced_by):
            self._drop_slice(artifact.name)
        logger.warning("step %d group %d is quarantined: %s", action.step, action.group, action.reason)

    def _abandon_evaluation(self, action: AbandonEvaluation) -> None:
        self._abandoned.add(action.version)
        logger.warning("the evaluation of version %d is abandoned: %s", action.version, action.reason)

    def _nothing(self, action: Wait) -> None:
        """Nothing to send."""

    _SUBMIT: ClassVar[dict[type[Action], Callable[[Dispatcher, Any], None]]] = {
        Encode: _encode,
        Generate: _generate,
        Score: _score,
        Train: _train,
        Commit: _commit,
        Publish: _publish,
        SwitchRole: _switch_role,
        Evaluate: _evaluate,
        Save: _save,
        Export: _export,
        Restore: _restore,
        Quarantine: _quarantine,
        AbandonEvaluation: _abandon_evaluation,
        Wait: _nothing,
    }

    def _send_when_encoded(self, worker: str, job: Job, prompts: Sequence[PromptRow]) -> None:
        if all(self.prompts.is_encoded(prompt) for prompt in prompts):
            self._send(worker, job)
        else:
            logger.info("%s waits for its prompts", describe(job))
            self._parked.append(job)

    def _with_state(self, job: Any) -> Any:
        return replace(job, keeps_state=self.versions.keeps_state, sharded=self.recipe.sharded)

    def _chunk_prompts(self, chunk: HeldOutChunk) -> tuple[PromptRow, ...]:
        assert self.recipe.evaluation is not None
        size = self.recipe.evaluation.chunk
        return self.prompts.held_out[chunk.index * size : (chunk.index + 1) * size]

    def _send(self, worker: str, job: Job) -> None:
        """Sends a job of the scheduler, unless it has yet to hear that the worker is lost: it issues it again."""
        if worker not in self._unheard_losses:
            self._jobs.send(worker, job)

    def _send_own(self, worker: str, job: Job, callback: Callable[[Any], None]) -> None:
        self._callbacks[job.id] = callback
        self._jobs.send(worker, job)

    # --- Results: keep their outputs, and report them -----------------------------------------------------------

    def _handle(self, message: Message) -> None:
        self._ticked = False
        worker, report = message.worker, message.report
        if isinstance(report, Gone):
            self._lose(worker, report)
        elif isinstance(report, StartFailed):
            raise_failure(worker, report)
        elif isinstance(report, Ready):
            self._worker_ready(worker)
        else:
            assert message.job_id is not None
            completed = self._jobs.complete(worker, message.job_id, self._now_ns)
            if isinstance(report, InputsLost):
                self._inputs_lost(completed, set(report.names))
            else:
                self._absorb(completed, report)

    def _absorb(self, completed: CompletedJob, result: Result) -> None:
        job = completed.job
        callback = self._callbacks.pop(job.id, None)
        if isinstance(result, JobFailed):
            if callback is not None or not isinstance(job, Generate | Score | Evaluate):
                raise_failure(completed.worker, result)
            self._drop_outputs(job)
        keep = self._KEEP.get(type(result))
        if keep is not None:
            keep(self, completed, result)
        if callback is not None:
            callback(result)
            return
        self._events.append(replace(result, at_ns=self._now_ns, job=job))
        if isinstance(result, Committed) and self.costs is not None:
            self._events.append(self.costs.measured(self._now_ns))

    def _encoded(self, completed: CompletedJob, result: Encoded) -> None:
        assert isinstance(completed.job, Encode)
        self.prompts.add_encoded(completed.job.prompts)
        parked, self._parked = self._parked, []
        for job in parked:
            self.submit(job)

    def _generated(self, completed: CompletedJob, result: Generated) -> None:
        job = completed.job
        assert isinstance(job, Generate) and self.costs is not None
        self.costs.add_slices(job.lane, job.slice.size // self._slice_size, completed.took_ns)
        artifact = SliceArtifact(job.slice, slice_name(job.id), result.version)
        if not self._samples.add_slice(artifact):
            self._drop_slice(artifact.name)
        elif result.scores is not None:
            self._samples.add_scores(job.slice, result.scores)

    def _scored(self, completed: CompletedJob, result: Scored) -> None:
        job = completed.job
        assert isinstance(job, Score)
        if isinstance(job.piece, HeldOutChunk):
            self.artifacts.drop(held_out_name(job.piece))
            return
        self._measure("score", completed, job.piece.size)
        self._samples.add_scores(job.piece, result.scores)
        if job.artifact is not None and self._samples.all_scored(job.artifact):
            self.artifacts.drop(pixels_name(job.artifact.name))

    def _trained(self, completed: CompletedJob, result: Trained) -> None:
        assert isinstance(completed.job, Train)
        self._updates += result.updates
        self._measure("train_sample", completed, completed.job.slice.size)

    def _committed(self, completed: CompletedJob, result: Committed) -> None:
        job = completed.job
        assert isinstance(job, Commit)
        self._measure("commit", completed)
        rewards, parts, slices = self._samples.close_step(job.step)
        for artifact in slices:
            self._drop_slice(artifact.name)
        updates, self._updates = (*self._updates, *result.updates), []
        self._take_weights(job.new_version, result.weights)
        self.prompts.close_step(job.step)
        publish_s, self._publish_s = self._publish_s, 0.0  # of the slowest lane, for the version before this one
        self._hooks.on_step(step_summary(job.step, rewards, parts, updates, result.weights.bytes, publish_s))

    def _exported(self, completed: CompletedJob, result: Exported) -> None:
        assert isinstance(completed.job, Export)
        self._take_weights(completed.job.version, result.weights)

    def _take_weights(self, version: int, weights: Any) -> None:
        self.versions.take(version, weights)
        self.versions.drop_old(self._jobs.jobs())

    def _published(self, completed: CompletedJob, result: Published) -> None:
        if self.costs is not None:
            self.costs.add("publish", round(result.seconds * 1e9))
        self._publish_s = max(self._publish_s, result.seconds)
        self.versions.drop_old(self._jobs.jobs())

    def _role_switched(self, completed: CompletedJob, result: RoleSwitched) -> None:
        assert isinstance(completed.job, SwitchRole)
        self._measure("switch_in" if completed.job.role == "generate" else "switch_out", completed)

    def _evaluated(self, completed: CompletedJob, result: Evaluated) -> None:
        assert isinstance(completed.job, Evaluate)
        self._measure("evaluate", completed)
        if completed.job.chunk.version in self._abandoned:
            self.artifacts.drop(held_out_name(completed.job.chunk))

    def _saved(self, completed: CompletedJob, result: Saved) -> None:
        self._measure("save", completed)

    _KEEP: ClassVar[dict[type[Result], Callable[[Dispatcher, CompletedJob, Any], None]]] = {
        Encoded: _encoded,
        Generated: _generated,
        Scored: _scored,
        Trained: _trained,
        Committed: _committed,
        Exported: _exported,
        Published: _published,
        RoleSwitched: _role_switched,
        Evaluated: _evaluated,
        Saved: _saved,
    }

    def _measure(self, kind: str, completed: CompletedJob, samples: int = 1) -> None:
        if self.costs is not None:
            self.costs.add(kind, completed.took_ns // samples)

    def _drop_slice(self, name: str) -> None:
        self.artifacts.drop(name)
        self.artifacts.drop(pixels_name(name))

    def _drop_outputs(self, job: Job) -> None:
        """Removes what a job that did not complete may have left."""
        if isinstance(job, Generate | Evaluate):
            for name in job.writes():
                self.artifacts.drop(name)
        elif isinstance(job, Score) and isinstance(job.piece, HeldOutChunk):
            self.artifacts.drop(held_out_name(job.piece))

    # --- Lost artifacts -----------------------------------------------------------------------------------------

    def _inputs_lost(self, completed: CompletedJob, names: set[str]) -> None:
        """Reports what was lost. Before the run begins, it is made again and the job is sent again."""
        job = completed.job
        logger.warning("%s: lost with a machine: %s", describe(job), ", ".join(sorted(names)))
        if isinstance(job, Restore):
            raise TrainerLostError("the trainer is lost, and so is the state that was kept in memory")
        lost_rows = [row for row in _prompts_of(job) if row.row in names]
        for row in lost_rows:
            self.prompts.forget(row.row)
        if not self._begun or job.id in self._callbacks:
            self._recover_and_resend(completed.worker, job, lost_rows)
            return
        lost = [each for each in _slices_of(job) if {each.name, pixels_name(each.name)} & names]
        for artifact in lost:
            self._drop_slice(artifact.name)
        lost = [artifact for artifact in lost if self._samples.remove_slice(artifact)]
        self._events.append(
            ArtifactLost(
                self._now_ns,
                job,
                slices=tuple(artifact.slice for artifact in lost),
                prompts=tuple(self._ids_of(job, lost_rows)),
                weights=isinstance(job, Publish),
            )
        )

    def _recover_and_resend(self, worker: str, job: Job, lost_rows: Sequence[PromptRow]) -> None:
        if isinstance(job, Publish):
            export = self._with_state(Export(self.own_job_id(), 0, job.version))

            def publish_again(result: Exported) -> None:
                self._jobs.send(worker, replace(job, weights=result.weights))

            self._send_own(TRAINER, export, publish_again)
            return
        encode = Encode(self.own_job_id(), 0, HELD_OUT_STEP, (), tuple(lost_rows))
        self._send_own(self.encoder(), encode, lambda result: self._jobs.send(worker, job))

    def _ids_of(self, job: Job, rows: Sequence[PromptRow]) -> list[tuple[int, int]]:
        """The (step, group) pairs of prompts that a job reads."""
        if isinstance(job, Evaluate):
            return [(HELD_OUT_STEP, self.prompts.held_out.index(row)) for row in rows]
        if rows and isinstance(job, Generate | Train):
            return [(job.slice.step, job.slice.group)]
        return []

    # --- Workers that come and go -------------------------------------------------------------------------------

    def _lose(self, worker: str, gone: Gone) -> None:
        """Reports the loss and starts a replacement as soon as there is room."""
        if worker == TRAINER and self._begun and self.versions.kept_state is None:
            raise TrainerLostError(f"{TRAINER} {gone.reason}, and its state is not kept in memory")
        self._supervisor.count_loss(worker, gone)
        names = rank_names(self._supervisor.assignment(worker))
        lost = [(name, job) for name in dict.fromkeys((worker, *names)) for job in self._jobs.lose(name)]
        for _, job in lost:
            self._drop_outputs(job)
        if self._begun:
            self._report_loss(worker)
            for _, job in lost:
                self._callbacks.pop(job.id, None)
        else:
            self._resend_to_replacement(worker, lost)
        self._supervisor.want(worker)
        self._supervisor.fill()

    def _report_loss(self, worker: str) -> None:
        rewards = self.reward_workers()
        if worker == TRAINER:
            self._updates = []
            names = {TRAINER, *rank_names(self.workers.trainer)}
            self._parked = [job for job in self._parked if self._worker_of(job) not in names]
            self._unheard_losses.update(names)
            self._events.append(WorkerLost(self._now_ns, 0, "trainer"))
        elif worker == ENCODER:
            self._unheard_losses[worker] += 1
            self._events.append(WorkerLost(self._now_ns, 0, "encoder"))
        elif worker in rewards:
            self._unheard_losses[worker] += 1
            self._events.append(WorkerLost(self._now_ns, rewards.index(worker), "reward"))
        else:
            for lane in self.lanes.lanes_of(worker):
                self.lanes.lose(lane)
                self._returning[worker] = lane
                self._events.append(WorkerLost(self._now_ns, lane))

    def _worker_of(self, job: Job) -> str:
        return self.lanes.worker(job.lane) if isinstance(job, Generate | Evaluate) else TRAINER

    def _hear_of_loss(self, event: WorkerLost) -> None:
        names = {"encoder": {ENCODER}, "trainer": {TRAINER, *rank_names(self.workers.trainer)}}
        heard = {self.reward_workers()[event.lane]} if event.pool == "reward" else set()
        self._unheard_losses -= Counter(names.get(event.pool, heard))

    def _resend_to_replacement(self, worker: str, lost: Sequence[tuple[str, Job]]) -> None:
        """Before the run, a replacement takes over the jobs; a generator loads the exported weights first."""
        generates = "generate" in self._supervisor.assignment(worker).duties and worker != TRAINER
        if generates and self.versions.newest.name:
            version, weights = self.versions.newest_version, self.versions.newest
            publish = Publish(self.own_job_id(), 0, version, (), weights)
            self._send_own(worker, publish, lambda result: None)
        for name, job in lost:
            self._jobs.send(name, job)

    def _worker_ready(self, worker: str) -> None:
        self._supervisor.ready(worker)
        self._starting.discard(worker)
        if not self._begun:
            return
        if worker in self.reward_workers():
            self._events.append(WorkerRestarted(self._now_ns, self.reward_workers().index(worker)))
        elif worker in self._returning:
            assert self.costs is not None
            self._join(self.costs.offer(self._returning.pop(worker), worker))
        elif worker not in (TRAINER, ENCODER):
            self._calibrate_newcomer(worker)

    def _calibrate_newcomer(self, worker: str) -> None:
        """A lane whose speed is unknown generates a slice before it joins."""
        own = own_slice(self._supervisor.assignment(worker), self._slice_size)
        prompt = self.prompts.row(min(self.versions.newest_version, self.recipe.steps - 1), 0)
        sizes = tuple(dict.fromkeys((self._slice_size, own)))

        def calibrated(result: Calibrated) -> None:
            self._join(timed_offer(worker, result.seconds, self._slice_size, own))

        job = Calibrate(self.own_job_id(), self._now_ns, "generate", prompt, sizes)
        self._send_own(worker, job, calibrated)

    def _join(self, offer: LaneOffer) -> None:
        """Adds a lane for the worker that the offer names."""
        lane = self.lanes.join(self._supervisor.assignment(offer.name))
        offer = replace(offer, name=self.lanes.names[lane])
        assert self.costs is not None
        self.costs.add_lane(lane, offer)
        self._events.append(WorkerJoined(self._now_ns, offer))


def raise_failure(worker: str, failure: JobFailed | StartFailed) -> NoReturn:
    """Ends the run. A user error is shown as it is; anything else comes with its details."""
    if failure.user_error:
        raise ConfigError(failure.reason)
    raise WorkerFailedError(f"{worker} could not continue: {failure.reason}\n{failure.details}".rstrip())


def _prompts_of(job: Job) -> tuple[PromptRow, ...]:
    if isinstance(job, Evaluate):
        return job.prompts
    if isinstance(job, Train):
        return (job.group.prompt,)
    if isinstance(job, Generate | Calibrate) and job.prompt is not None:
        return (job.prompt,)
    return ()


def _slices_of(job: Job) -> tuple[SliceArtifact, ...]:
    if isinstance(job, Score) and job.artifact is not None:
        return (job.artifact,)
    return job.group.slices if isinstance(job, Train) else ()
