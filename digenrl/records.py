"""The vocabulary of a run: ids, artifacts, jobs and results.

The scheduler's actions are jobs, and workers carry them out. A worker's results are the scheduler's events. Every
job has an id, and a result carries its job, so results are matched by id and never by position in a queue.

Tensors do not travel in records. Workers leave them in the exchange under the names of artifacts. Fields made by
`_data` are for workers: the driver fills them in before it sends a job, and reads them from a result. The
scheduler neither reads nor compares them, and the journal omits them.

Times are whole nanoseconds on the run's clock, which starts at 0, or where a resumed run had stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cache
from typing import Any, Literal, Self

Role = Literal["generate", "train"]
Pool = Literal["generator", "reward", "trainer", "encoder"]
PassKind = Literal["rollout", "replay", "masked"]
Kernel = Literal["flash", "cudnn", "efficient", "math", "native"]
CalibrationTask = Literal["forward", "generate", "score", "train", "switch", "commit"]

# The rules of a schedule, by name.
OrderRuleName = Literal["generation", "batch"]
StreamRuleName = Literal["group", "batch", "sample"]
HelpRuleName = Literal["none", "greedy", "search", "auto"]
AssistName = Literal["none", "trainer", "both"]
DispatchRuleName = Literal["eager", "earliest_finish"]

HELD_OUT_STEP = -1  # the `step` of jobs that encode held-out prompts
NO_LANE = -1  # of calibrations before the run
NO_JOB = -1


def _data(default: Any = None) -> Any:
    return field(default=default, compare=False, repr=False, metadata={"data": True})


# --- Ids -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class SampleId:
    """One sample of a run: `SampleId(step=5, group=2, index=7)` is the eighth of the third group of step 5."""

    step: int
    group: int
    index: int


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """Consecutive samples of one group that are generated, scored or trained together.

    >>> [sample.index for sample in Slice(step=0, group=1, first=4, size=2).samples()]
    [4, 5]
    """

    step: int
    group: int
    first: int
    size: int

    def samples(self) -> Iterator[SampleId]:
        """The ids of its samples, in order."""
        return (SampleId(self.step, self.group, self.first + offset) for offset in range(self.size))

    def mask(self) -> int:
        """Its samples as bits of the group's set of samples."""
        return ((1 << self.size) - 1) << self.first


@dataclass(frozen=True, slots=True, order=True)
class HeldOutChunk:
    """Some held-out prompts, sampled together to evaluate a version. The driver knows which prompts."""

    version: int
    index: int


@dataclass(frozen=True, slots=True)
class LaneOffer:
    """A device that can generate: its name and its expected time per job.

    The lane takes up to `slices_at_once` neighboring slices of one group in one job, which takes `slice_ns`.
    `take_ns` gives the time of 1, 2, ... slices, up to all of them, relative to the last entry. Without it, time
    is proportional to the number of slices. `slice_ns` is 0 if the lane has not been calibrated.

    A lane that can train alone needs `train_sample_ns` per sample, and has to switch between the roles: in
    `switch_in_ns` from training to generating, in `switch_out_ns` back.

    A lane gets a new version in `publish_ns`; -1 means in the time of the run, `Costs.publish_ns`.

    >>> LaneOffer("h100-0", slice_ns=6, slices_at_once=3, take_ns=(3, 4, 5)).expected_ns(1)
    4
    """

    name: str
    slice_ns: int
    slices_at_once: int = 1
    take_ns: tuple[int, ...] = ()
    train_sample_ns: Fraction = Fraction(0)
    switch_in_ns: int = 0
    switch_out_ns: int = 0
    publish_ns: int = -1

    def expected_ns(self, slices: int) -> int:
        """The expected time of a job with this many slices, at least 1 ns."""
        if slices == self.slices_at_once:
            return self.slice_ns
        if not self.take_ns:
            return max(1, self.slice_ns * slices // self.slices_at_once)
        part_ns, all_ns = self.take_ns[slices - 1], self.take_ns[-1]
        return max(1, (2 * self.slice_ns * part_ns + all_ns) // (2 * all_ns))


# --- Artifacts: what workers leave in the exchange, by name. ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt and the name of its encoded row, which also holds its images. Errors say `where` it is.

    If it is `paired`, its group has two samples that are not generated: its chosen and its rejected image.
    """

    row: str
    text: str
    metadata: Mapping[str, Any]
    sources: int = 0  # number of source images
    held_out: bool = False
    paired: bool = False
    where: str = ""


@dataclass(frozen=True, slots=True)
class SliceArtifact:
    """The trajectories of a generated slice, and the weight version that made them."""

    slice: Slice
    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Scores:
    """One reward per sample, and the named parts that explain it."""

    values: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class GroupArtifact:
    """A complete, scored group and its place in the batch, with the rewards of all its samples.

    Slices are in the order of their samples: all of them, or those that have some wanted samples.
    """

    place: int
    prompt: PromptRow
    slices: tuple[SliceArtifact, ...]
    rewards: tuple[float, ...]

    @property
    def index(self) -> int:
        """The group's number in its step."""
        return self.slices[0].slice.group

    def names(self) -> tuple[str, ...]:
        """Its artifacts: the prompt's row, and the slices."""
        return (self.prompt.row, *(each.name for each in self.slices))


@dataclass(frozen=True, slots=True)
class WeightsReference:
    """The published weights of one version. If they have a patch, workers that have `base` need only that."""

    name: str
    bytes: int
    checksum: int
    base: str = ""
    patch_bytes: int = 0


NO_WEIGHTS = WeightsReference("", 0, 0)  # where no other worker reads them


def slice_name(job_id: int) -> str:
    """The trajectories that a Generate job leaves."""
    return f"slice-{job_id}"


def pixels_name(name: str) -> str:
    """The decoded pixels of a slice, until they are scored."""
    return f"{name}-pixels"


def held_out_name(chunk: HeldOutChunk) -> str:
    """The decoded pixels of held-out samples, until they are scored."""
    return f"held-out-{chunk.version}-{chunk.index}"


def gradients_name(job_id: int) -> str:
    """The gradient sums that a SendGradients job leaves."""
    return f"gradients-{job_id}"


def update_name(job_id: int) -> str:
    """The trained weights that a TakeUpdate job leaves."""
    return f"update-{job_id}"


def weights_name(version: int) -> str:
    """The published weights of a version."""
    return f"weights-{version}"


def patch_name(weights: str) -> str:
    """The patch that leads from the version before to these weights."""
    return f"{weights}.patch"


def state_name(version: int, rank: int) -> str:
    """The trainer's state at a version, from which a replacement trainer continues; one per rank if sharded."""
    return f"state-{version}-{rank}"


# --- Actions and jobs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Action:
    """A decision of the scheduler."""


@dataclass(frozen=True, slots=True)
class Job(Action):
    """Work for one worker, answered by one result, or by one per lane for Publish."""

    id: int
    issued_ns: int

    def reads(self) -> tuple[str, ...]:
        """Names that must be in the exchange."""
        return ()

    def writes(self) -> tuple[str, ...]:
        """Names that may be in the exchange afterwards."""
        return ()

    def for_rank(self, rank: int) -> Self:
        """The job as one of several trainer ranks gets it."""
        return self

    def without_data(self) -> Self:
        """The job as the scheduler issued it: what the driver filled in need not travel back with the result."""
        kind: type = type(self)
        defaults = _data_defaults(kind)
        return replace(self, **defaults) if defaults else self


@cache
def _data_defaults(kind: type) -> Mapping[str, Any]:
    return {each.name: each.default for each in fields(kind) if each.metadata.get("data")}


@dataclass(frozen=True, slots=True)
class Encode(Job):
    """Encode the prompts of some groups. Result: Encoded.

    `images` are files, a tuple for every prompt: its source images, then its pair; empty if no prompt has any.
    """

    step: int
    groups: tuple[int, ...]
    prompts: tuple[PromptRow, ...] = _data(())
    images: tuple[tuple[bytes, ...], ...] = _data(())

    def writes(self) -> tuple[str, ...]:
        return _rows(self.prompts)


@dataclass(frozen=True, slots=True)
class Generate(Job):
    """Generate and decode a slice, or encode images of a pair. A worker that also scores, scores it.

    Result: Generated. `version` is that of the weights when the job was issued. A newer version may arrive before
    it starts; then the whole slice is made with that one. If it `hedges` another job, both generate the same
    slice, and the first result counts.
    """

    slice: Slice
    lane: int
    version: int
    prompt: PromptRow = _data()
    hedges: int = field(default=NO_JOB, kw_only=True)

    @property
    def stale(self) -> bool:
        """Whether its weights are one version behind its step."""
        return self.version < self.slice.step

    def reads(self) -> tuple[str, ...]:
        return (self.prompt.row,)

    def writes(self) -> tuple[str, ...]:
        return (slice_name(self.id), pixels_name(slice_name(self.id)))


@dataclass(frozen=True, slots=True)
class Score(Job):
    """Score generated samples of one slice, or a held-out chunk, on a reward lane. Result: Scored."""

    piece: Slice | HeldOutChunk
    scorer: int
    artifact: SliceArtifact | None = _data()  # the slice that the samples are part of
    prompts: tuple[PromptRow, ...] = _data(())  # one per sample

    def pixels(self) -> str:
        if isinstance(self.piece, HeldOutChunk):
            return held_out_name(self.piece)
        assert self.artifact is not None
        return pixels_name(self.artifact.name)

    def reads(self) -> tuple[str, ...]:
        return (self.pixels(), *_rows(edited_prompts(self.prompts)))


@dataclass(frozen=True, slots=True)
class Train(Job):
    """Replay samples and add their gradient to the open batch. Result: Trained.

    The trainer carries it out, or one `lane` if every lane can train on its own. The samples are a whole group, or
    some of a complete one. A lane needs the weights of the step's open `update`; if the trainer was lost after the
    first one, the step is trained once more in a new `attempt`.
    """

    slice: Slice
    lane: int = NO_LANE
    update: int = 0
    attempt: int = 0
    group: GroupArtifact = _data()
    weights: WeightsReference = _data(NO_WEIGHTS)  # of an update after the first

    def reads(self) -> tuple[str, ...]:
        return (*self.group.names(), self.weights.name) if self.weights.name else self.group.names()


@dataclass(frozen=True, slots=True)
class SendGradients(Job):
    """Leave the gradient sums of a step in the exchange, for the commit, and start over. Result: GradientsSent."""

    step: int
    lane: int
    attempt: int = 0

    def writes(self) -> tuple[str, ...]:
        return (gradients_name(self.id),)


@dataclass(frozen=True, slots=True)
class TakeUpdate(Job):
    """Take an optimizer update of a step before its last one, and export the trained weights. Result: UpdateTaken.

    For lanes that train on their own, which need these weights for the next update. For the fields see Commit.
    """

    step: int
    update: int
    gradients: tuple[int, ...] = ()
    groups: tuple[GroupArtifact, ...] = _data(())
    replays: bool = _data(False)

    def reads(self) -> tuple[str, ...]:
        return _names_for_update(self.gradients, self.groups if self.replays else ())

    def writes(self) -> tuple[str, ...]:
        return (update_name(self.id),)


@dataclass(frozen=True, slots=True)
class _TrainerArtifacts(Job, ABC):
    """A job that leaves weights and, if `keeps_state`, the trainer's state: of rank 0, or of all if sharded."""

    keeps_state: bool = field(default=False, kw_only=True, compare=False, metadata={"data": True})
    sharded: bool = field(default=False, kw_only=True, compare=False, metadata={"data": True})
    rank: int = field(default=0, kw_only=True, compare=False, metadata={"data": True})

    @property
    @abstractmethod
    def new_version(self) -> int:
        """The version that it leaves."""

    @property
    def weights_name(self) -> str:
        """The name of the weights that it leaves."""
        return weights_name(self.new_version)

    @property
    def writes_state(self) -> bool:
        """Whether this rank leaves its state."""
        return self.keeps_state and (self.sharded or self.rank == 0)

    def writes(self) -> tuple[str, ...]:
        weights = (self.weights_name,) if self.rank == 0 else ()
        return (*weights, state_name(self.new_version, self.rank)) if self.writes_state else weights

    def for_rank(self, rank: int) -> Self:
        return replace(self, rank=rank)


@dataclass(frozen=True, slots=True)
class Commit(_TrainerArtifacts):
    """Take the optimizer step and export the new version, `step + 1`. Result: Committed.

    `gradients` are the SendGradients jobs whose sums are added first. If lanes train on their own, `groups` are
    all groups of the step; with `replays`, some of their samples may have to be replayed once more.
    """

    step: int
    gradients: tuple[int, ...] = ()
    groups: tuple[GroupArtifact, ...] = _data(())
    replays: bool = _data(False)

    def reads(self) -> tuple[str, ...]:
        return _names_for_update(self.gradients, self.groups if self.replays else ())

    @property
    def new_version(self) -> int:
        return self.step + 1


@dataclass(frozen=True, slots=True)
class Export(_TrainerArtifacts):
    """Export the trainer's current version again. Result: Exported."""

    version: int

    @property
    def new_version(self) -> int:
        return self.version


@dataclass(frozen=True, slots=True)
class Restore(Job):
    """Load the state that a lost trainer had at `version`. Result: Restored."""

    version: int
    sharded: bool = _data(False)
    rank: int = _data(0)

    def reads(self) -> tuple[str, ...]:
        return (state_name(self.version, self.rank if self.sharded else 0),)

    def for_rank(self, rank: int) -> Self:
        return replace(self, rank=rank)


@dataclass(frozen=True, slots=True)
class Publish(Job):
    """Load a version on these lanes, to be served from their next slice on. Result: Published, from each lane."""

    version: int
    lanes: tuple[int, ...]
    weights: WeightsReference = _data(NO_WEIGHTS)

    def reads(self) -> tuple[str, ...]:
        return (self.weights.name,) if self.weights.name else ()


@dataclass(frozen=True, slots=True)
class SwitchRole(Job):
    """The trainer's lanes change from training to generating, or back. Result: RoleSwitched."""

    role: Role


@dataclass(frozen=True, slots=True)
class Evaluate(Job):
    """Sample held-out prompts with the version that the lane serves. Result: Evaluated.

    A worker that also scores, scores them. The result has pictures of the first `shown` prompts.
    """

    chunk: HeldOutChunk
    lane: int
    first: int = _data(0)  # index of its first prompt
    prompts: tuple[PromptRow, ...] = _data(())
    shown: int = _data(0)

    def reads(self) -> tuple[str, ...]:
        return _rows(self.prompts)

    def writes(self) -> tuple[str, ...]:
        return (held_out_name(self.chunk),)


@dataclass(frozen=True, slots=True)
class Save(Job):
    """Write a checkpoint of the version after `step` optimizer steps, and export its weights. Result: Saved."""

    step: int
    run: str = _data("")
    facts: Mapping[str, Any] = _data()
    keep: int = _data(1)


@dataclass(frozen=True, slots=True)
class Calibrate(Job):
    """Do a little work of one kind, discard it, and report how long it took. Result: Calibrated.

    During a run the scheduler issues it for a `lane` that has joined; the prompt is the first of `step`.
    `sizes` are slice sizes for "generate" and the number of samples for other tasks. `held_out` are batch sizes of
    an evaluation. `at_once` is how many samples are generated together before training is timed. A lane that also
    trains is timed with `trained` samples, in the same job, and uses the trainer's `pack_size`. "forward" uses
    the given `kernels`, or measures the device's rate; with a prompt, it also counts the operations of a forward
    and tries the attention kernels of these `passes`.
    """

    task: CalibrationTask
    prompt: PromptRow | None = _data()
    sizes: tuple[int, ...] = _data(())
    held_out: tuple[int, ...] = _data(())
    at_once: int | None = _data()
    trained: int = _data(0)
    pack_size: int = _data(0)  # 0: its own
    passes: tuple[PassKind, ...] = _data(())
    kernels: Mapping[PassKind, Kernel] | None = _data()
    lane: int = field(default=NO_LANE, kw_only=True)
    step: int = field(default=0, kw_only=True)

    def reads(self) -> tuple[str, ...]:
        if self.prompt is None or (self.task == "score" and not self.prompt.sources):
            return ()
        return (self.prompt.row,)


LaneJob = Generate | Evaluate | Calibrate | Train | SendGradients  # what a lane holds


def holding_lane(job: Job) -> int | None:
    """The lane that holds this job; None if a reward lane, the encoder or the trainer as a whole does."""
    return job.lane if isinstance(job, LaneJob) and job.lane != NO_LANE else None


@dataclass(frozen=True, slots=True)
class Wait(Action):
    """The trainer could help and waits instead. Nothing to do, but part of the journal."""


@dataclass(frozen=True, slots=True)
class Wake(Action):
    """Report a Tick at this time, even if nothing happens until then."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Quarantine(Action):
    """Discard all samples of a group. A fresh group takes its place in the step."""

    step: int
    group: int
    replaced_by: int
    reason: str


@dataclass(frozen=True, slots=True)
class AbandonEvaluation(Action):
    """The evaluation of this version cannot be completed."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp(Action):
    """Too many groups of one step failed: stop the run with this reason."""

    reason: str


def _names_for_update(gradients: Iterable[int], groups: Iterable[GroupArtifact]) -> tuple[str, ...]:
    sent = (gradients_name(job_id) for job_id in gradients)
    return (*sent, *(name for group in groups for name in group.names()))


def _rows(prompts: Iterable[PromptRow]) -> tuple[str, ...]:
    return tuple(prompt.row for prompt in prompts)


def edited_prompts(prompts: Iterable[PromptRow]) -> tuple[PromptRow, ...]:
    """The different prompts that have source images, which rewards read."""
    return tuple({prompt.row: prompt for prompt in prompts if prompt.sources}.values())


# --- Events and results. Tick closes an instant and asks for work. ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """A fact reported to the scheduler at `at_ns`."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Result(Event):
    """What became of a job. The driver sets `at_ns`; a worker leaves it 0."""

    job: Job


@dataclass(frozen=True, slots=True)
class Encoded(Result):
    """The prompts' rows are in the exchange."""

    job: Encode


@dataclass(frozen=True, slots=True)
class Generated(Result):
    """The slice's trajectories are in the exchange; its pixels too, unless the lane has scored them.

    `version` is that of the weights used. `score_failure` says why a lane that scores could not.
    """

    job: Generate
    version: int
    score_failure: str = ""
    scores: Scores | None = _data()


@dataclass(frozen=True, slots=True)
class Scored(Result):
    """The rewards are known and finite."""

    job: Score
    scores: Scores = _data()


@dataclass(frozen=True, slots=True)
class Trained(Result):
    """The gradient is accumulated. `updates` are metrics of optimizer updates before the batch's last."""

    job: Train
    updates: tuple[Mapping[str, Any], ...] = _data(())


@dataclass(frozen=True, slots=True)
class GradientsSent(Result):
    """The lane's gradient sums are in the exchange."""

    job: SendGradients


@dataclass(frozen=True, slots=True)
class UpdateTaken(Result):
    """The optimizer update is taken, and the trained weights are in the exchange."""

    job: TakeUpdate
    updates: tuple[Mapping[str, Any], ...] = _data(())
    weights: WeightsReference = _data(NO_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Committed(Result):
    """The optimizer step is taken. The trainer's lanes have the new version."""

    job: Commit
    updates: tuple[Mapping[str, Any], ...] = _data(())
    weights: WeightsReference = _data(NO_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Exported(Result):
    """The version's weights are in the exchange. `state_bytes` is the size of the state that one rank left."""

    job: Export
    weights: WeightsReference = _data(NO_WEIGHTS)
    state_bytes: int = _data(0)


@dataclass(frozen=True, slots=True)
class Restored(Result):
    """The replacement trainer continues from the version."""

    job: Restore


@dataclass(frozen=True, slots=True)
class Published(Result):
    """These lanes have checked and loaded the version."""

    job: Publish
    lanes: tuple[int, ...]
    seconds: float = _data(0.0)


@dataclass(frozen=True, slots=True)
class RoleSwitched(Result):
    """The trainer's lanes can do the other kind of work."""

    job: SwitchRole


@dataclass(frozen=True, slots=True)
class Evaluated(Result):
    """The held-out chunk is sampled; its pixels are in the exchange unless the lane has scored them."""

    job: Evaluate
    scores: Scores | None = _data()
    pictures: tuple[tuple[str, bytes], ...] = _data(())  # names and contents of files


@dataclass(frozen=True, slots=True)
class Saved(Result):
    """The checkpoint is complete on disk."""

    job: Save
    path: str = _data("")


@dataclass(frozen=True, slots=True)
class Calibrated(Result):
    """Seconds per size for "generate"; per sample for "score" and "train"; for one change each way for "switch".

    The driver sets `offer`, what the lane can do by these times.

    Memory figures include weights and are 0 on a CPU. `planned_bytes` was expected once a pack had been tried, and
    `predicted_bytes` before. `moved_bytes` leave the device when its role changes. `generate_flop` and
    `train_flop` are the operations of one sample, `matrix_tflops` is the device's rate, and `attention` holds the
    seconds of the kernels that were tried, by kind of pass.
    """

    job: Calibrate
    seconds: Mapping[int, float] = _data()  # keyed by slice size; {1: seconds per sample} for other tasks
    train_seconds: float = _data(0.0)  # per sample, of a lane that also trains
    seconds_back: float = _data(0.0)
    peak_bytes: Mapping[int, int] = _data()
    pack_size: int = _data(0)
    checkpointed_blocks: int = _data(0)
    planned_bytes: int = _data(0)
    predicted_bytes: int = _data(0)
    moved_bytes: int = _data(0)
    generate_flop: float = _data(0.0)
    train_flop: float = _data(0.0)
    matrix_tflops: float = _data(0.0)
    attention: Mapping[PassKind, Mapping[Kernel, float]] | None = _data()
    offer: LaneOffer = LaneOffer("", 0)


@dataclass(frozen=True, slots=True)
class JobFailed(Result):
    """The worker is alive but could not do the job. `reason` explains a `user_error`; else see `details`."""

    reason: str
    user_error: bool = False
    details: str = _data("")


@dataclass(frozen=True, slots=True)
class ArtifactLost(Result):
    """The job was not carried out: artifacts that it reads went away with the machine that held them."""

    slices: tuple[Slice, ...] = ()
    prompts: tuple[tuple[int, int], ...] = ()  # (step, group)
    weights: bool = False
    gradients: tuple[int, ...] = ()  # ids of SendGradients jobs


@dataclass(frozen=True, slots=True)
class WorkerJoined(Event):
    """A generator lane is ready. It has no weights yet, and may have to be calibrated."""

    offer: LaneOffer


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A lane is gone, and so is the job it held. A lost generator lane never returns; a replacement joins."""

    lane: int
    pool: Pool = "generator"


@dataclass(frozen=True, slots=True)
class WorkerRestarted(Event):
    """A replacement for a lost reward lane is ready."""

    lane: int
    pool: Pool = "reward"


@dataclass(frozen=True, slots=True)
class CostsMeasured(Event):
    """The newest measured costs. They replace all expected costs; lanes not in `lane_slice_ns` keep theirs."""

    train_sample_ns: Fraction
    commit_ns: int
    publish_ns: int
    switch_in_ns: int
    switch_out_ns: int
    score_ns: int  # per sample
    evaluate_ns: int = 0  # per held-out chunk
    save_ns: int = 0
    lane_slice_ns: tuple[tuple[int, int], ...] = ()  # (lane, time of a full job)
    lane_train_ns: tuple[tuple[int, Fraction], ...] = ()  # (lane, time per sample), of lanes that train alone
    send_ns: int = 0  # until a lane has sent its gradient sums
    lane_publish_ns: tuple[tuple[int, int], ...] = ()  # (lane, until it has a new version), if lanes differ


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """The user asked the run to save and stop."""


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Every event of this instant has been reported: hand out work now."""
