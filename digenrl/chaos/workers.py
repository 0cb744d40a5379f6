"""Simulated workers: what each job does to the world, following the rules of real workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from digenrl.chaos.exchange import VirtualExchange
from digenrl.chaos.promises import (
    Contribution,
    History,
    TrainedUpdate,
    check_update,
    contributions,
    promise,
    reward_of,
)
from digenrl.chaos.worlds import World
from digenrl.records import (
    NO_LANE,
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
    GradientsSent,
    HeldOutChunk,
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
    SendGradients,
    SwitchRole,
    TakeUpdate,
    Train,
    Trained,
    UpdateTaken,
    WeightsReference,
    held_out_name,
    holding_lane,
    pixels_name,
    slice_name,
)
from digenrl.scheduling import Terms
from digenrl.transports.contract import InputsLost, Report
from digenrl.worker.assignment import Assignment

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


@dataclass(frozen=True, slots=True)
class SavedRun:
    """What a checkpoint holds: the step, what led to its weights, and the number of jobs issued by then.

    It has the weights of the version before if the trainer that saved it has made the step, and a resumed run may
    need them. `evaluations` are older versions that were still being evaluated.
    """

    step: int = 0
    history: History = ()
    jobs_issued: int = 0
    has_version_before: bool = False
    evaluations: tuple[int, ...] = ()


@dataclass(slots=True)
class WorldFacts:
    """What outlives a driver: the terms of the run, its checkpoint, and the groups that were quarantined.

    `committed` has the gradients of every step that was committed.
    """

    terms: Terms | None = None
    saved: SavedRun = SavedRun()
    quarantined: set[tuple[int, int]] = field(default_factory=set)
    committed: dict[int, list[Contribution]] = field(default_factory=dict)


class SimulatedWorker:
    """One worker: carries out its jobs one after the other, at once; the transport gives them their time."""

    def __init__(self, assignment: Assignment, world: World, exchange: VirtualExchange, facts: WorldFacts) -> None:
        self.assignment, self._world, self._exchange, self._facts = assignment, world, exchange, facts
        self.node = world.node(assignment.name)
        self.history: History = facts.saved.history if assignment.commits else ()  # of its version
        self._updates: History = ()  # of the open step
        self._has_version_before = assignment.commits and facts.saved.has_version_before
        self.version = facts.saved.step if assignment.commits else 0
        self._sum: list[Contribution] = []
        self._opened = (0, 0, 0)
        self._lane: int | None = None
        self._inputs: dict[str, Any] = {}  # of its job

    def begin(self, job: Job) -> Report | None:
        """Reads what the job needs. Returns a report if that is lost, or if the job is not needed any more."""
        self._check_lane(job)
        reads = () if isinstance(job, Publish) and job.version <= self.version else job.reads()
        missing = self._exchange.missing(reads)
        if not missing:
            self._inputs = {name: self._exchange.get(name) for name in reads}
            return None
        if all(name in self._exchange.lost for name in missing):
            return InputsLost(tuple(missing))
        promise(self._may_miss(job), f"{job} reads {missing}, which the driver has dropped")
        return JobFailed(0, job, f"FileNotFoundError: {missing[0]}")

    def carry_out(self, job: Job) -> Report:
        return self._CARRY_OUT[type(job)](self, job)

    def _check_lane(self, job: Job) -> None:
        """A generator belongs to one lane; after a loss, its replacement belongs to another."""
        lanes = job.lanes if isinstance(job, Publish) else tuple({holding_lane(job)} - {None})
        if self.assignment.commits:
            return
        for lane in lanes:
            self._lane = lane if self._lane is None else self._lane
            promise(lane == self._lane, f"{job} is sent to {self.assignment.name}, which is lane {self._lane}")

    def _may_miss(self, job: Job) -> bool:
        """Whether a score is not needed any more: its group is quarantined, or its evaluation abandoned."""
        if not isinstance(job, Score):
            return False
        piece = job.piece
        return isinstance(piece, HeldOutChunk) or (piece.step, piece.group) in self._facts.quarantined

    def _put(self, name: str, content: Any = None) -> None:
        self._exchange.put(name, content, self.node)

    # --- Generators and reward lanes ----------------------------------------------------------------------------

    def _encode(self, job: Encode) -> Report:
        for name in job.writes():
            self._put(name)
        return Encoded(0, job)

    def _generate(self, job: Generate) -> Report:
        name, piece = slice_name(job.id), job.slice
        promise(piece.step - 1 <= self.version <= piece.step, f"{job} is generated with version {self.version}")
        promise(self.version >= job.version, f"{job} needs weights that were never loaded")
        self._put(name, (piece, self.version))
        if "score" in self.assignment.duties:
            return Generated(0, job, self.version, scores=self._rewards(name, piece.first, piece.size))
        self._put(pixels_name(name), piece)
        return Generated(0, job, self.version)

    def _score(self, job: Score) -> Report:
        if isinstance(job.piece, HeldOutChunk):
            return Scored(0, job, self._rewards(held_out_name(job.piece), 0, len(job.prompts)))
        assert job.artifact is not None
        promise(
            job.artifact.slice.mask() & job.piece.mask() == job.piece.mask(),
            f"{job} scores pictures of {job.artifact.slice}",
        )
        promise(self._inputs[pixels_name(job.artifact.name)] == job.artifact.slice, f"{job}: wrong pixels")
        return Scored(0, job, self._rewards(job.artifact.name, job.piece.first, job.piece.size))

    def _rewards(self, name: str, first: int, size: int) -> Scores:
        return Scores(tuple(reward_of(name, index) for index in range(first, first + size)), {})

    def _evaluate(self, job: Evaluate) -> Report:
        promise(self.version == job.chunk.version, f"{job} is sampled with version {self.version}")
        if "score" in self.assignment.duties:
            return Evaluated(0, job, self._rewards(held_out_name(job.chunk), 0, len(job.prompts)))
        self._put(held_out_name(job.chunk))
        return Evaluated(0, job)

    def _publish(self, job: Publish) -> Report:
        if not self.assignment.commits and job.version > self.version:
            found = self._inputs[job.weights.name]
            promise(found == job.version, f"{job} loads version {found}")
            self.version, self._sum, self._opened = job.version, [], (job.version, 0, 0)
        return Published(0, job, job.lanes, self._world.publish_s)

    def _calibrate(self, job: Calibrate) -> Report:
        slice_s = self._world.slice_seconds(self.assignment.name)
        seconds = {size: slice_s * size / self._world.slice_size for size in job.sizes}
        return Calibrated(0, job, seconds, train_seconds=self._world.train_sample_s if job.trained else 0.0)

    # --- The trainer, and lanes that train ----------------------------------------------------------------------

    def _train(self, job: Train) -> Report:
        if not self.assignment.commits:
            wanted = (job.slice.step, job.update, job.attempt)
            if self._opened != wanted:
                self._sum, self._opened = [], wanted
        promise(job.slice.step == self.version, f"{job} is trained on version {self.version}")
        for artifact in job.group.slices:
            made = self._inputs[artifact.name]
            promise(made == (artifact.slice, artifact.version), f"{job} takes {made} for {artifact}")
        self._sum += contributions(job.group, job.slice)
        return Trained(0, job)

    def _send_gradients(self, job: SendGradients) -> Report:
        promise(job.step == self.version, f"{job} while the lane is at version {self.version}")
        self._put(job.writes()[0], tuple(self._sum))
        self._sum = []
        return GradientsSent(0, job)

    def _take_update(self, job: TakeUpdate) -> Report:
        self._add_update(job, job.update)
        for name in job.writes():
            self._put(name)
        return UpdateTaken(0, job, (UPDATE,), WeightsReference(job.writes()[0], 100, 7))

    def _commit(self, job: Commit) -> Report:
        promise(job.step == self.version, f"{job} on version {self.version}")
        terms = self._terms
        self._add_update(job, max(1, terms.updates) - 1 if terms.shares_work else 0)
        self._facts.committed[job.step] = [each for update in self._updates for each in update.sum]
        self.version, self.history, self._updates = job.new_version, (*self.history, *self._updates), ()
        self._has_version_before = self._world.recipe.keeps_published(job.step)
        return Committed(0, job, (UPDATE,), self._export_version(job))

    def _add_update(self, job: Commit | TakeUpdate, update: int) -> None:
        total = list(self._sum)
        for name in job.reads():
            if name.startswith("gradients-"):
                total += self._inputs[name]
        check_update(self._terms, job.step, update, total)
        self._updates = (*self._updates, TrainedUpdate(job.step, update, tuple(total)))
        self._sum = []

    @property
    def _terms(self) -> Terms:
        assert self._facts.terms is not None, "the run has begun"
        return self._facts.terms

    def _export(self, job: Export) -> Report:
        return Exported(0, job, self._export_version(job), 0)

    def _export_version(self, job: Commit | Export) -> WeightsReference:
        before = job.new_version == self.version - 1 and self._has_version_before and job.rank == 0
        if not self._world.recipe.topology.publishes or (job.new_version != self.version and not before):
            return NO_WEIGHTS
        if before:
            self._put(job.weights_name, job.new_version)
            return WeightsReference(job.weights_name, 100, 7)
        for name in job.writes():
            self._put(name, self.history if name.startswith("state-") else self.version)
        return WeightsReference(job.writes()[0], 100, 7) if job.rank == 0 else NO_WEIGHTS

    def _restore(self, job: Restore) -> Report:
        self.history, self.version, self._updates = self._inputs[job.reads()[0]], job.version, ()
        self._sum, self._has_version_before = [], False
        return Restored(0, job)

    def _save(self, job: Save) -> Report:
        promise(job.step == self.version, f"{job} while the trainer is at {self.version}")
        before = self._has_version_before
        self._facts.saved = SavedRun(job.step, self.history, has_version_before=before, **job.facts)
        return Saved(0, job, f"step_{job.step:06d}")

    def _switch(self, job: SwitchRole) -> Report:
        return RoleSwitched(0, job)

    _CARRY_OUT: ClassVar[dict[type[Job], Callable[[SimulatedWorker, Any], Report]]] = {
        Encode: _encode,
        Generate: _generate,
        Score: _score,
        Evaluate: _evaluate,
        Publish: _publish,
        Calibrate: _calibrate,
        Train: _train,
        SendGradients: _send_gradients,
        TakeUpdate: _take_update,
        Commit: _commit,
        Export: _export,
        Restore: _restore,
        Save: _save,
        SwitchRole: _switch,
    }


def nominal_seconds(world: World, worker: str, job: Job) -> float:
    """The time of a job without faults."""
    rest_s = 0.1 * world.train_sample_s
    if isinstance(job, Generate):
        return world.slice_seconds(worker) * job.slice.size / world.slice_size
    if isinstance(job, Evaluate):
        return world.slice_seconds(worker) * len(job.prompts)
    if isinstance(job, Calibrate | Save):
        return 2 * world.slice_seconds(worker)
    if isinstance(job, Score):
        return world.score_sample_s * len(job.prompts)
    if isinstance(job, Train):
        lanes = 1 if job.lane == NO_LANE else 2
        return lanes * world.train_sample_s * job.slice.size
    return world.publish_s if isinstance(job, Publish) else rest_s
