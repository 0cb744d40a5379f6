"""The driver's dispatcher: jobs go to workers with their inputs filled in, and results come back as events.

It works with any transport, handles names and numbers but never tensors, and needs no torch.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NoReturn

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.attention import Kernels
from digenrl.config.recipes.recipe import Recipe
from digenrl.driver.cost_tracker import CostTracker, timed_offer
from digenrl.driver.job_deadlines import JobDeadlines, OverdueJob
from digenrl.driver.job_inputs import JobInputs, MissingInputError, prompts_of, slices_of
from digenrl.driver.job_outputs import JobOutputs, with_valid_scores
from digenrl.driver.pending_jobs import CompletedJob, PendingJobs
from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.repeated_failures import RepeatedFailures
from digenrl.driver.step_summary import StepSummary
from digenrl.driver.stores import DriverStores
from digenrl.driver.supervisor import Supervisor, TrainerLostError, WorkerFailedError
from digenrl.exchange.deliveries import SLOWEST_BYTES_PER_S
from digenrl.logs import describe
from digenrl.records import (
    HELD_OUT_STEP,
    NO_WEIGHTS,
    AbandonEvaluation,
    Action,
    ArtifactLost,
    Calibrated,
    Commit,
    Committed,
    Encode,
    Encoded,
    Evaluate,
    Event,
    Export,
    Exported,
    Generate,
    Job,
    JobFailed,
    LaneOffer,
    PromptRow,
    Publish,
    Quarantine,
    Restore,
    Result,
    Save,
    Score,
    StopRequested,
    TakeUpdate,
    Tick,
    Train,
    Wake,
    WorkerJoined,
    WorkerLost,
    WorkerRestarted,
    gradients_name,
    holding_lane,
    pixels_name,
)
from digenrl.transports.contract import Gone, InputsLost, Message, RunResources
from digenrl.worker.assignment import ENCODER, TRAINER, DeviceFailed, PeersLost, Ready, StartFailed, rank_names

logger = logging.getLogger(__name__)

RECEIVE_TIMEOUT_S = 0.25  # how long to wait for messages before `poll` is called again
TIMEOUTS_PER_JOB = 2  # overdue jobs with the same slice or chunk, after which it counts as failed
NO_FACTS: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class RunHooks:
    """What a run adds to its dispatcher.

    `poll` is called several times a second and may raise. `on_step` gets the metrics of every committed
    step. `notify` shows a message to the user. `checkpoint_facts` describes a step for its checkpoint. `monotonic`
    is a clock in seconds, for deadlines.
    """

    poll: Callable[[], None] = lambda: None
    on_step: Callable[[StepSummary], None] = lambda summary: None
    notify: Callable[[str], None] = lambda message: None
    checkpoint_facts: Callable[[int], Mapping[str, Any]] = lambda step: NO_FACTS
    monotonic: Callable[[], float] = time.monotonic


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
        hooks: RunHooks,
    ) -> None:
        self._clock, self._poll, self._notify = clock, hooks.poll, hooks.notify
        self.stores = DriverStores(recipe, resources.workers, resources.artifacts, prompts)
        slowest = SLOWEST_BYTES_PER_S if recipe.topology.uses_ray else math.inf
        deadlines = JobDeadlines(recipe.lanes.patience_s, hooks.monotonic, recipe.scoring_limit_s, slowest)
        self._jobs = PendingJobs(resources.transport, clock, deadlines)
        self._inputs = JobInputs(self.stores, hooks.checkpoint_facts)
        self._outputs = JobOutputs(self.stores, self._jobs.jobs, hooks.on_step)
        self._supervisor = Supervisor(
            resources.workers, self._jobs, recipe.lanes.restarts, hooks.monotonic, hooks.notify
        )
        self._failures = RepeatedFailures(hooks.notify)
        self._timeouts: Counter[object] = Counter()  # by the slice or chunk whose job was overdue
        self._events: deque[Event] = deque()
        self._now_ns = clock()
        self._ticked, self._begun = True, False
        self._own_ids = count(-1, -1)  # of jobs that the scheduler does not issue
        self._callbacks: dict[int, Callable[[Any], None]] = {}  # for results of those jobs
        self._parked: list[tuple[Job, tuple[tuple[int, int], ...]]] = []  # with the prompts that they wait for
        self._stalled: list[ArtifactLost] = []  # until the scheduler hears that the trainer is lost
        self._starting: set[str] = set()
        self._wake_ns: int | None = None  # when the scheduler wants a tick
        self._unheard_losses: Counter[str] = Counter()  # lost workers of which the scheduler has yet to hear
        self._returning: dict[str, int] = {}  # the lane that a generator had before it was lost

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
            self._unheard_losses -= Counter(self._names_of(event))
        return event

    def submit(self, action: Action) -> None:
        """Sends a job to its workers, or does what another action asks for."""
        if isinstance(action, Job):
            self._submit_job(action)
        elif isinstance(action, Quarantine):
            logger.warning("step %d group %d is quarantined: %s", action.step, action.group, action.reason)
            self._failures.quarantined(action)
            for artifact in self.stores.samples.replace(action.step, action.group, action.replaced_by):
                self.stores.drop_slice(artifact.name)
        elif isinstance(action, Wake):
            self._wake_ns = action.at_ns
        elif isinstance(action, AbandonEvaluation):
            logger.warning("the evaluation of version %d is abandoned: %s", action.version, action.reason)
            self._drop_parked_evaluation(action.version)
            self._outputs.abandon_evaluation(action.version, [job for job, _ in self._parked])

    def use_kernels(self, kernels: Kernels) -> None:
        """Workers that are started from now on use these attention kernels."""
        model = self.stores.recipe.model.model_copy(update={"attention": dict(kernels)})
        self._supervisor.use_model(model)

    def use_costs(self, costs: CostTracker, slice_size: int) -> None:
        """Results are measured from now on."""
        self.stores.costs, self.stores.slice_size = costs, slice_size

    def begin(self) -> None:
        """The scheduler takes over. The first tick hands out work, and reserve generators may join."""
        assert self.stores.costs is not None, "a run begins after its calibration"
        self._now_ns, self._ticked, self._begun = self._clock(), False, True
        for assignment in self.stores.workers.reserve:
            self._supervisor.want(assignment.name)

    def request_stop(self) -> None:
        """The user asked the run to save and stop."""
        self._ticked = False
        self._events.append(StopRequested(self._now_ns))

    def receive(self) -> None:
        """Handles the messages that have arrived; waits briefly if there are none."""
        self._poll()  # it may raise, so before any message is taken
        messages = self._jobs.transport.receive(RECEIVE_TIMEOUT_S)
        if messages:  # all belong to one instant: the arrival of the last of them
            waited_ns = min(message.waited_ns for message in messages)
            self._now_ns = max(self._now_ns, self._clock() - waited_ns)
        for message in messages:
            self._handle(message)
        closed = not self._events and self._ticked  # or else a tick has yet to close the instant of the messages
        if closed and self._wake_ns is not None and self._clock() >= self._wake_ns:
            self._now_ns, self._ticked, self._wake_ns = max(self._now_ns, self._clock()), False, None
        self._end_overdue(self._jobs.overdue())
        late = self._supervisor.late_start()
        if late is not None:
            self._now_ns, self._ticked = max(self._now_ns, self._clock()), False
            self._end(late.worker, f"was not ready after {late.waited_s:.0f} s and was ended")
        self._supervisor.start_pending()

    # --- Before the run -----------------------------------------------------------------------------------------

    def start_workers(self) -> None:
        """Starts all workers and waits until they are ready."""
        names = [each.name for each in self.stores.workers.initial()]
        self._starting = set(names)
        for name in names:
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
        groups = self.stores.prompts.groups(step)
        missing = self.stores.prompts.missing(step, groups)
        if missing:
            job = Encode(self.own_job_id(), self._clock(), step, groups)
            self.ask([self._inputs.encoding(job, missing)])

    def export_now(self, version: int) -> Exported:
        """Exports the trainer's version and waits for it."""
        export = self._inputs.with_state(Export(self.own_job_id(), 0, version))
        exported: Exported = self.ask([(TRAINER, export)])[0]
        return exported

    # --- Jobs ---------------------------------------------------------------------------------------------------

    def _submit_job(self, job: Job) -> None:
        try:
            requests = self._inputs.requests(job)
        except MissingInputError:
            self._events.append(ArtifactLost(self._now_ns, job))
            return
        if isinstance(job, Encode) and not requests:
            self._events.append(Encoded(self._now_ns, job))
        for worker, filled in requests:
            if worker in self._unheard_losses:
                continue  # the scheduler issues it again when it hears of the loss
            missing = [prompt for prompt in prompts_of(filled) if not self.stores.prompts.is_encoded(prompt)]
            if not missing:
                self._jobs.send(worker, filled)
            else:
                logger.info("%s waits for its prompts", describe(job))
                self._parked.append((job, self._inputs.prompt_ids(filled, missing)))

    def _send_own(self, worker: str, job: Job, callback: Callable[[Any], None]) -> None:
        self._callbacks[job.id] = callback
        self._jobs.send(worker, job)

    # --- Messages -----------------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        self._ticked = False
        worker, report = message.worker, message.report
        if isinstance(report, Gone):
            self._lose(worker, report)
        elif isinstance(report, DeviceFailed):
            self._end(worker, report.reason)
        elif isinstance(report, StartFailed):
            self._start_failed(worker, report)
        elif isinstance(report, Ready):
            if report.remark:
                logger.info(report.remark)
                self._notify(report.remark)
            self._worker_ready(worker)
        else:
            assert message.job_id is not None
            assert not isinstance(report, PeersLost), "a worker of several ranks is gone if they lost each other"
            completed = self._jobs.complete(worker, message.job_id, self._now_ns)
            if completed is None:
                logger.warning("%s: a late or doubled result of job %d is dropped", worker, message.job_id)
                self._outputs.discard_late(report)
            elif isinstance(report, InputsLost):
                self._inputs_lost(completed, set(report.names))
            else:
                self._take_result(completed, report)

    def _take_result(self, completed: CompletedJob, result: Result) -> None:
        job = completed.job
        # The job as it was sent, with its inputs.
        result = replace(with_valid_scores(job, result), at_ns=self._now_ns, job=job)
        callback = self._callbacks.pop(job.id, None)
        if isinstance(result, JobFailed):
            if callback is not None or not isinstance(job, Generate | Score | Evaluate):
                self._worker_failed(completed.worker, result)
                return
            self._outputs.discard(job)
        self._failures.observe(completed.worker, result)
        self._outputs.keep(completed, result)
        if isinstance(result, Encoded):
            parked, self._parked = self._parked, []
            for each, _ in parked:
                self._submit_job(each)
        if callback is not None:
            callback(result)
            return
        if isinstance(result, Calibrated):
            result = replace(result, offer=self._calibrated_offer(result))
        self._events.append(result)
        if isinstance(job, Encode):
            self._report_not_encoded(job)
        if isinstance(result, Committed) and self.stores.costs is not None:
            self._supervisor.step_committed()
            self._events.append(self.stores.costs.measured(self._now_ns, self.stores.lanes.present))
        if self._failures.fails_always(completed.worker) and self._is_spare(completed.worker):
            self._end(completed.worker, "failed several jobs in a row and was ended")

    def _worker_failed(self, worker: str, failure: JobFailed) -> None:
        """A job failed that is not tried again: ends the run, or only a worker without which it can continue."""
        if not self._is_spare(worker):
            raise_failure(worker, failure)
        self._outputs.discard(failure.job, worker_lost=True)
        logger.warning("%s", failure.details)
        self._end(worker, f"failed {describe(failure.job)} and was ended: {failure.reason}")

    def _drop_parked_evaluation(self, version: int) -> None:
        """Frees the lanes of an abandoned evaluation that still wait for prompts; they may load other weights."""
        parked, self._parked = self._parked, []
        for job, prompts in parked:
            if isinstance(job, Evaluate) and job.chunk.version == version:
                self._events.append(ArtifactLost(self._now_ns, job))
            else:
                self._parked.append((job, prompts))

    def _report_not_encoded(self, job: Encode) -> None:
        """Jobs that still wait for its prompts: these were encoded when it was sent, and have been lost since."""
        groups = {(job.step, group) for group in job.groups}
        for each, prompts in self._parked:
            if groups & set(prompts):
                self._events.append(ArtifactLost(self._now_ns, each, prompts=prompts))
        self._parked = [each for each in self._parked if not groups & set(each[1])]

    def _inputs_lost(self, completed: CompletedJob, names: set[str]) -> None:
        """Reports what was lost. Before the run begins, it is made again and the job is sent again."""
        job, stores = completed.job, self.stores
        logger.warning("%s: lost with a machine: %s", describe(job), ", ".join(sorted(names)))
        if isinstance(job, Restore):
            raise TrainerLostError("the trainer is lost, and so is the state that was kept in memory")
        lost_rows = [row for row in prompts_of(job) if row.row in names]
        for row in lost_rows:
            stores.prompts.forget(row.row)
        if not self._begun or job.id in self._callbacks:
            self._recover_and_resend(completed.worker, job, lost_rows)
            return
        self._outputs.discard(job)
        lost = [each for each in slices_of(job) if {each.name, pixels_name(each.name)} & names]
        for artifact in lost:
            stores.drop_slice(artifact.name)
        slices = tuple(artifact.slice for artifact in lost if stores.samples.remove_slice(artifact))
        prompts, weights = self._inputs.prompt_ids(job, lost_rows), isinstance(job, Publish)
        sent = job.gradients if isinstance(job, Commit | TakeUpdate) else ()
        gradients = tuple(job_id for job_id in sent if gradients_name(job_id) in names)
        loss = ArtifactLost(self._now_ns, job, slices, prompts, weights, gradients)
        if isinstance(job, Train) and job.weights.name in names and job.weights == stores.versions.of_update:
            self._stalled.append(loss)  # the trainer, which made these weights, is about to be lost
        else:
            self._events.append(loss)

    def _recover_and_resend(self, worker: str, job: Job, lost_rows: Sequence[PromptRow]) -> None:
        if isinstance(job, Publish):
            export = self._inputs.with_state(Export(self.own_job_id(), 0, job.version))

            def publish_again(result: Exported) -> None:
                self._jobs.send(worker, replace(job, weights=result.weights))

            self._send_own(TRAINER, export, publish_again)
            return
        encode = Encode(self.own_job_id(), 0, HELD_OUT_STEP, ())
        encoder, filled = self._inputs.encoding(encode, tuple(lost_rows))
        self._send_own(encoder, filled, lambda result: self._jobs.send(worker, job))

    # --- Workers that come and go -------------------------------------------------------------------------------

    def _is_spare(self, worker: str) -> bool:
        """Whether the run can continue without this worker."""
        return self._begun and self._supervisor.is_spare(worker)

    def _end(self, worker: str, reason: str, fault: bool = True) -> None:
        """Ends a worker that is of no use any more."""
        self._jobs.transport.end(worker)
        self._lose(worker, Gone(reason, fault))

    def _lose(self, worker: str, gone: Gone) -> None:
        """Reports the loss and starts a replacement as soon as there is room, unless it failed too often."""
        self._failures.replaced(worker)
        if worker == TRAINER and self._begun and self.stores.versions.kept_state is None:
            raise TrainerLostError(f"{TRAINER} {gone.reason}, and its state is not kept in memory")
        replaced = self._supervisor.count_loss(worker, gone, self._is_spare(worker))
        names = dict.fromkeys((worker, *rank_names(self._supervisor.assignment(worker))))
        lost = [(name, job) for name in names for job in self._jobs.lose(name)]
        for _, job in lost:
            self._outputs.discard(job, worker_lost=True)
        self.stores.versions.drop_old(self._jobs.jobs())
        if self._begun:
            self._report_loss(worker)
            for _, job in lost:
                self._callbacks.pop(job.id, None)
        else:
            self._resend_to_replacement(worker, lost)
        if replaced:
            self._supervisor.want(worker)
        self._supervisor.fill()

    def _start_failed(self, worker: str, failure: StartFailed) -> None:
        """Ends the run, unless other generators are left: a machine that has joined may lack something."""
        self._jobs.transport.end(worker)
        for name in dict.fromkeys((worker, *rank_names(self._supervisor.assignment(worker)))):
            self._jobs.lose(name)
        if not self._is_spare(worker):
            raise_failure(worker, failure)
        logger.warning("%s could not start: %s\n%s", worker, failure.reason, failure.details)
        self._notify(f"{worker} could not start, and the run continues without it: {failure.reason}")

    def _end_overdue(self, overdue: OverdueJob | None) -> None:
        """Replaces a worker that hangs. A slice or chunk that lets workers hang repeatedly counts as failed."""
        if overdue is None:
            return
        worker, job = overdue.worker, overdue.job
        self._now_ns, self._ticked = max(self._now_ns, self._clock()), False
        reason = f"did not finish {describe(job)} in {overdue.waited_s:.0f} s and was ended"
        replaceable = (
            self._begun and job.id not in self._callbacks and isinstance(job, Generate | Score | Evaluate)
        )
        if replaceable:
            assert isinstance(job, Generate | Score | Evaluate)
            piece = job.piece if isinstance(job, Score) else job.chunk if isinstance(job, Evaluate) else job.slice
            self._timeouts[piece] += 1
            # The scheduler counts failed slices itself; scores and evaluations fail only once.
            if isinstance(job, Generate) or self._timeouts[piece] >= TIMEOUTS_PER_JOB:
                self._events.append(JobFailed(self._now_ns, job, f"{worker} {reason}"))
        self._end(worker, reason, fault=not replaceable)

    def _report_loss(self, worker: str) -> None:
        rewards, now_ns = self.stores.workers.reward_names, self._now_ns
        losses = []
        if worker == TRAINER:
            losses = [WorkerLost(now_ns, 0, "trainer")]
            self._outputs.forget_updates()
        elif worker == ENCODER:
            losses = [WorkerLost(now_ns, 0, "encoder")]
        elif worker in rewards:
            losses = [WorkerLost(now_ns, rewards.index(worker), "reward")]
        for lane in self.stores.lanes.lanes_of(worker) if not losses else []:
            self.stores.lanes.lose(lane)
            self._returning[worker] = lane
            losses.append(WorkerLost(now_ns, lane))
        if worker == TRAINER:
            stalled, self._stalled = self._stalled, []
            self._events += [replace(loss, at_ns=now_ns) for loss in stalled]
            self.stores.versions.take_update(NO_WEIGHTS)  # the step begins with its first update again
        for loss in losses:
            names = self._names_of(loss)
            self._unheard_losses += Counter(names)
            self._parked = [each for each in self._parked if self._worker_of(each[0]) not in names]
        self._events += losses

    def _names_of(self, loss: WorkerLost) -> set[str]:
        """The workers that must get no job until the scheduler has heard of their loss; lost lanes have none."""
        workers = self.stores.workers
        if loss.pool == "trainer":
            return {TRAINER, *rank_names(workers.trainer)}
        if loss.pool == "reward":
            return {workers.reward_names[loss.lane]}
        return {ENCODER} if loss.pool == "encoder" else set()

    def _worker_of(self, job: Job) -> str:
        if isinstance(job, Score):
            return self.stores.workers.reward_names[job.scorer]
        lane = holding_lane(job)
        return TRAINER if lane is None else self.stores.lanes.worker(lane)

    def _resend_to_replacement(self, worker: str, lost: Sequence[tuple[str, Job]]) -> None:
        """Before the run, a replacement takes over the jobs; a generator loads the exported weights first."""
        versions = self.stores.versions
        generates = "generate" in self._supervisor.assignment(worker).duties and worker != TRAINER
        if generates and versions.newest.name:
            publish = Publish(self.own_job_id(), 0, versions.newest_version, (), versions.newest)
            self._send_own(worker, publish, lambda result: None)
        for name, job in lost:
            self._jobs.send(name, job)

    def _worker_ready(self, worker: str) -> None:
        self._supervisor.ready(worker)
        self._jobs.ready(worker)
        self._starting.discard(worker)
        if not self._begun:
            return
        rewards = self.stores.workers.reward_names
        if worker in rewards:
            self._events.append(WorkerRestarted(self._now_ns, rewards.index(worker)))
        elif worker not in (TRAINER, ENCODER) and not self.stores.lanes.lanes_of(worker):
            self._join(worker)  # one that was replaced before the run began still has its lane

    def _join(self, worker: str) -> None:
        """Adds a lane for a worker, as fast as the one that the worker had, if any."""
        lanes, costs = self.stores.lanes, self.stores.costs
        assert costs is not None
        lane = lanes.join(self._supervisor.assignment(worker))
        offer = costs.offer(self._returning.pop(worker, None), lanes.names[lane])
        if offer.slice_ns:
            costs.add_lane(lane, offer)
        self._events.append(WorkerJoined(self._now_ns, offer))

    def _calibrated_offer(self, result: Calibrated) -> LaneOffer:
        job, stores = result.job, self.stores
        assert stores.costs is not None
        name, own_size = stores.lanes.names[job.lane], job.sizes[-1]
        offer = timed_offer(name, result.seconds, stores.slice_size, own_size, result.train_seconds)
        stores.costs.add_lane(job.lane, offer)
        return offer


def raise_failure(worker: str, failure: JobFailed | StartFailed) -> NoReturn:
    """Ends the run. A user error is shown as it is; anything else comes with its details."""
    if isinstance(failure, JobFailed) and isinstance(failure.job, Save):  # mostly a full disk, no mistake
        raise WorkerFailedError(f"{failure.reason}\n{failure.details}".rstrip())
    if failure.user_error:
        raise ConfigError(failure.reason)
    raise WorkerFailedError(f"{worker} could not continue: {failure.reason}\n{failure.details}".rstrip())
