"""The scheduler's state. It is immutable, so `decide` is pure and any moment can be kept or replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from digenrl.records import (
    Action,
    Calibrate,
    Commit,
    Encode,
    Evaluate,
    Export,
    Generate,
    HeldOutChunk,
    Job,
    LaneJob,
    LaneOffer,
    Restore,
    Result,
    Role,
    Save,
    Score,
    SendGradients,
    Slice,
    SwitchRole,
    TakeUpdate,
    Train,
)
from digenrl.scheduling.changes import replace
from digenrl.scheduling.order import slice_at
from digenrl.scheduling.terms import Costs, Terms

NO_VERSION = -2  # older than any step admits

AnyJob = TypeVar("AnyJob", bound=Job)
TrainerJob = TypeVar("TrainerJob", Train, Commit, TakeUpdate, Save, SwitchRole)


@dataclass(frozen=True, slots=True)
class Lane:
    """One device that can generate. It is idle or holds one job. A lost lane never returns.

    `slice_ns` is the time of a full job, 0 until it is calibrated; measurements replace it. `take_ns` are the
    offered times of 1, 2, ... slices in one job; it is empty for a lane that takes one slice at a time. A lane
    with a `train_sample_ns` can also train on its own. `trained` are the samples of the open step whose gradients
    it holds and has not sent.
    """

    index: int
    name: str
    slice_ns: int
    helper: bool  # one of the trainer's lanes
    version: int
    job: LaneJob | None = None
    take_ns: tuple[int, ...] = ()
    sent_version: int = NO_VERSION  # the newest version that was published to it, loaded or not
    train_sample_ns: Fraction = Fraction(0)
    switch_in_ns: int = 0
    switch_out_ns: int = 0
    publish_ns: int = -1  # until it has a new version; -1: `Costs.publish_ns`
    role: Role = "generate"
    trained: tuple[Slice, ...] = ()
    ends_ns: int = 0  # when its job is expected to end; kept, as what follows, only if lanes share work
    taken: int = 0  # slices of the current step that it has been given
    taken_ahead: int = 0  # those of the next step

    @property
    def calibrated(self) -> bool:
        """Whether its times are known. Until then it gets no work but its calibration."""
        return self.slice_ns > 0

    @property
    def slices_at_once(self) -> int:
        """The most neighboring slices of a group that one job can hold."""
        return len(self.take_ns) or 1

    @property
    def offer(self) -> LaneOffer:
        """Its offer, by the newest measurements."""
        return LaneOffer(
            self.name,
            self.slice_ns,
            self.slices_at_once,
            self.take_ns,
            self.train_sample_ns,
            self.switch_in_ns,
            self.switch_out_ns,
            self.publish_ns,
        )

    def expected_ns(self, slices: int) -> int:
        """The expected time of a job with this many slices."""
        return self.offer.expected_ns(slices) if self.take_ns else self.slice_ns

    def train_ns(self, samples: int) -> int:
        """The time in which it trains this many samples alone, rounded half to even."""
        # Much faster than to round a Fraction: every decision asks this of all lanes.
        parts = self.train_sample_ns.denominator
        whole, rest = divmod(samples * self.train_sample_ns.numerator, parts)
        return whole + (2 * rest > parts or (2 * rest == parts and whole % 2 == 1))

    def switch_ns(self, role: Role) -> int:
        """The time until it can work in this role."""
        if role == self.role:
            return 0
        return self.switch_in_ns if role == "generate" else self.switch_out_ns


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How far a group is, as sets of samples (bits). A retired group is quarantined and has been replaced."""

    scored: int = 0
    training: int = 0  # held by lanes that train on their own
    trained: int = 0
    stale: int = 0  # issued on the version one behind
    failures: int = 0
    retired: bool = False
    place: int = -1  # of a replacement, that of the first group it replaces; -1: its own index


@dataclass(frozen=True, slots=True, order=True)
class ReadyUnit:
    """Samples that may be trained, in the order in which they became ready. Ties go to the lower group."""

    ready_ns: int
    group: int
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class SentGradients:
    """Gradient sums in the exchange: the job that left them, and the samples that they cover."""

    job: SendGradients
    pieces: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The samples of a step that an interrupted run has generated with the version one behind.

    `stale` has them by group, as bits. A step is `closed` if its own version existed when the run was interrupted:
    then all other samples are generated with that.
    """

    index: int
    stale: tuple[tuple[int, int], ...] = ()
    closed: bool = False

    def has(self, piece: Slice) -> bool:
        """Whether all samples of a slice are among them."""
        return any(
            group == piece.group and samples & piece.mask() == piece.mask() for group, samples in self.stale
        )


@dataclass(frozen=True, slots=True)
class StepProgress:
    """One open step: what has not been handed out yet, what is ready to train, what remains."""

    index: int
    cursor: int  # position of the next slice that was never handed out
    reissue: tuple[Slice, ...]  # lost, failed or replacement slices, handed out before the cursor
    groups: tuple[GroupProgress, ...]  # replacements follow the first `prompts` groups
    ready: tuple[ReadyUnit, ...]
    unscored_groups: int
    untrained_groups: int
    stale_samples: int
    ahead: tuple[int, ...] = ()  # positions from the cursor on that are handed out or belong to a retired group
    # If lanes train on their own:
    update: int = 0  # the open optimizer update
    attempt: int = 0  # how often the trainer was lost after the first update
    untrained_samples: int = 0  # of the open update
    gradients: tuple[SentGradients, ...] = ()
    recorded: RecordedStep | None = None  # of a resumed run

    def place(self, group: int) -> int:
        """The place of a group in the batch."""
        own = self.groups[group].place
        return group if own < 0 else own


@dataclass(frozen=True, slots=True)
class EvaluationProgress:
    """The evaluation of one version on held-out prompts, in chunks."""

    version: int
    unstarted: tuple[int, ...]
    sampling: int = 0  # chunks that lanes hold
    unscored: int = 0  # sampled chunks without scores

    @property
    def sampled(self) -> bool:
        """Whether no lane needs this version for it any more."""
        return not self.unstarted and not self.sampling


# --- What the trainer is doing ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HelpPlan:
    """How long the trainer helps in one bubble."""

    rounds: int
    stop_when_ready: bool  # return after a round when there is something to train
    current_step_only: bool  # start a round only while a slice of the current step is unstarted

    def wants_round(self, rounds_done: int, ready: bool) -> bool:
        """Whether to start another round if a slice may start; `ready`: whether there is something to train."""
        if self.stop_when_ready and ready and rounds_done > 0:
            return False
        return rounds_done < self.rounds


@dataclass(frozen=True, slots=True)
class Free:
    """No job. `bubble_decided`: the decision for this bubble was to wait."""

    bubble_decided: bool = False


@dataclass(frozen=True, slots=True)
class Busy:
    """Doing a job, after which it is free: with SwitchRole, its lanes change back to training."""

    job: Train | Commit | TakeUpdate | Save | SwitchRole


@dataclass(frozen=True, slots=True)
class Restoring:
    """A replacement trainer loads the last version's state, then exports its weights again.

    It then saves a version whose checkpoint the lost trainer had not finished.
    """

    job: Restore | Export
    saves: bool = False


@dataclass(frozen=True, slots=True)
class SwitchingIn:
    """Its lanes change to generating: to help by a plan or, colocated, for the next step."""

    job: SwitchRole
    plan: HelpPlan | None


@dataclass(frozen=True, slots=True)
class BetweenRounds:
    """Its lanes can generate and are idle."""

    plan: HelpPlan
    rounds_done: int


@dataclass(frozen=True, slots=True)
class Helping:
    """A round is running: at least one of its lanes holds a job."""

    plan: HelpPlan
    rounds_done: int  # this one included


@dataclass(frozen=True, slots=True)
class Generating:
    """Colocated: all lanes generate the step's slices."""


TrainerState = Free | Busy | Restoring | SwitchingIn | BetweenRounds | Helping | Generating


@dataclass(frozen=True, slots=True)
class PlannedBubble:
    """How many rounds of help to run in the bubble that opens at `opens_ns`; 0 means wait."""

    opens_ns: int
    rounds: int


@dataclass(frozen=True, slots=True)
class BubblePlan:
    """What a help rule intends for the coming bubbles of a step. It holds while the run goes as predicted."""

    step: int
    bubbles: tuple[PlannedBubble, ...]
    exact: bool  # no better plan exists, by prediction
    length: int  # its number of bubbles when it was made


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Everything that `decide` knows."""

    terms: Terms
    costs: Costs
    lanes: tuple[Lane, ...]  # by number; a lost one keeps its place
    present: tuple[int, ...]  # the lanes that are not lost, in their order
    idle: tuple[int, ...]  # idle generator lanes, in the order of `idle_rank`; calibrated ones only
    helpers: tuple[int, ...]
    steps: tuple[StepProgress, ...]  # the current step and, unless it is the last, the next
    scorers: tuple[Score | None, ...]  # what each reward lane holds
    unscored: tuple[Slice | HeldOutChunk, ...]  # waiting for a reward lane, oldest first
    trainer: TrainerState
    committed: int = 0  # optimizer steps taken, which is the newest version
    publishing: tuple[tuple[int, int], ...] = ()  # (version, when it was sent) while lanes have not got it
    jobs_issued: int = 0
    bubble_plan: BubblePlan | None = None
    absent_scorers: frozenset[int] = frozenset()
    void_scores: frozenset[int] = frozenset()  # Score jobs whose samples were lost: their results are dropped
    encoding: tuple[Encode, ...] = ()
    encoded_steps: int = 0  # steps, from the first on, whose prompts are encoded or being encoded
    exporting: Export | None = None
    evaluations: tuple[EvaluationProgress, ...] = ()  # oldest first
    saved: int | None = None  # the newest version that is in a checkpoint
    stopping: bool = False
    copies: tuple[tuple[int, int], ...] = ()  # Generate jobs of one slice that both run: the job, and its copy
    void_jobs: frozenset[int] = frozenset()  # those whose copy was faster: their results are dropped
    wake_ns: int = -1  # the tick that was asked for last
    uncalibrated: tuple[int, ...] = ()  # lanes that wait for their Calibrate job
    recorded: tuple[RecordedStep, ...] = ()  # what a resumed run has to repeat

    @property
    def present_lanes(self) -> list[Lane]:
        """The lanes that are not lost. A long run may have lost far more."""
        return [self.lanes[index] for index in self.present]

    @property
    def all_committed(self) -> bool:
        """Whether all optimizer steps are taken."""
        return self.committed == self.terms.steps

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do: no step, no evaluation, no checkpoint."""
        unsaved = self.terms.save_every > 0 and self.saved != self.committed
        if self.stopping:
            return not unsaved
        return self.committed == self.terms.steps and not unsaved and not self.evaluations

    @property
    def current(self) -> StepProgress:
        """The lowest uncommitted step. There is none after the last commit."""
        return self.steps[0]


Outcome = tuple[SchedulerState, tuple[Action, ...]]  # of a decision: the next state, and what to do


def initial_state(
    terms: Terms,
    costs: Costs,
    generators: Sequence[LaneOffer],
    helpers: Sequence[LaneOffer] = (),
    *,
    committed: int = 0,
    jobs_issued: int = 0,
    evaluations: Sequence[int] = (),
    served: int | None = None,
    recorded: Sequence[RecordedStep] = (),
) -> SchedulerState:
    """The state before the first event: every lane has the newest version, and no job is issued.

    A resumed run passes the optimizer steps it has `committed`, which is its newest version, and the number of
    jobs it had issued, so that ids stay unique. Steps and versions keep their numbers, and `terms.steps` counts
    from the beginning. `evaluations` are versions to evaluate first. To repeat the `recorded` steps of the
    interrupted run, or its last evaluation, generator lanes may start on an older version that they have `served`.
    """
    assert 0 <= committed <= terms.steps, f"{committed} of {terms.steps} steps are committed"
    offers = [(offer, False) for offer in generators] + [(offer, True) for offer in helpers]
    of_generators = committed if served is None else served
    lanes = tuple(
        lane_of(index, offer, is_helper, version=committed if is_helper else of_generators)
        for index, (offer, is_helper) in enumerate(offers)
    )
    generating = [lane for lane in lanes if terms.colocated or terms.shares_work or not lane.helper]
    return SchedulerState(
        terms=terms,
        costs=costs,
        lanes=lanes,
        present=tuple(range(len(lanes))),
        idle=tuple(lane.index for lane in sorted(generating, key=lambda lane: idle_rank(costs, lane))),
        helpers=() if terms.colocated or terms.shares_work else tuple(lane.index for lane in lanes if lane.helper),
        steps=tuple(
            fresh_step(terms, index, recorded) for index in range(committed, min(committed + 2, terms.steps))
        ),
        scorers=(None,) * terms.scorers,
        unscored=(),
        trainer=Generating() if terms.colocated else Free(),
        committed=committed,
        encoded_steps=committed + 2,  # the steps that are open are encoded before
        jobs_issued=jobs_issued,
        saved=committed or None,  # what a resumed run has committed is in the checkpoint that it resumes from
        evaluations=tuple(fresh_evaluation(terms, version) for version in evaluations),
        recorded=tuple(recorded),
    )


def idle_rank(costs: Costs, lane: Lane) -> tuple[int, int, int]:
    """Idle lanes are offered slices in this order: the fastest first, then those that get new versions first."""
    return lane.slice_ns, costs.publication_ns(lane.publish_ns), lane.index


def lane_of(index: int, offer: LaneOffer, helper: bool, version: int) -> Lane:
    at_once = offer.slices_at_once
    take_ns = tuple(offer.expected_ns(slices) for slices in range(1, at_once + 1)) if at_once > 1 else ()
    return Lane(
        index,
        offer.name,
        offer.slice_ns,
        helper,
        version,
        take_ns=take_ns,
        sent_version=version,
        train_sample_ns=offer.train_sample_ns,
        switch_in_ns=offer.switch_in_ns,
        switch_out_ns=offer.switch_out_ns,
        publish_ns=offer.publish_ns,
        role="train" if helper else "generate",
    )


def fresh_evaluation(terms: Terms, version: int) -> EvaluationProgress:
    """An evaluation of which no chunk has been handed out."""
    return EvaluationProgress(version, tuple(range(terms.evaluation_chunks)))


def fresh_step(terms: Terms, index: int, recorded: Sequence[RecordedStep] = ()) -> StepProgress:
    """A step of which nothing has been handed out. Slices that are recorded as stale come first."""
    record = next((_within_budget(terms, each) for each in recorded if each.index == index), None)
    positions = range(terms.slices_per_step) if record is not None and record.stale else ()
    first = {at: piece for at in positions if record and record.has(piece := slice_at(terms, index, at))}
    return StepProgress(
        index=index,
        cursor=0,
        reissue=tuple(first.values()),
        ahead=tuple(first),
        recorded=record,
        groups=(GroupProgress(),) * terms.prompts,
        ready=(),
        unscored_groups=terms.prompts,
        untrained_groups=terms.prompts,
        stale_samples=0,
        untrained_samples=terms.samples_of_update(0),
    )


def _within_budget(terms: Terms, record: RecordedStep) -> RecordedStep:
    """The record without groups that would exceed the stale budget."""
    kept, left = [], terms.stale_budget
    for group, samples in record.stale:
        if samples.bit_count() <= left:
            kept.append((group, samples))
            left -= samples.bit_count()
    return replace(record, stale=tuple(kept))


def is_available(state: SchedulerState, lane: Lane) -> bool:
    """Whether a lane that does both may take work: the trainer's own take none while it commits or saves."""
    return not lane.helper or not state.terms.shares_work or isinstance(state.trainer, Free)


def issue(state: SchedulerState, at_ns: int, kind: type[AnyJob], *fields: object) -> tuple[SchedulerState, AnyJob]:
    """A new job with the next id."""
    return replace(state, jobs_issued=state.jobs_issued + 1), kind(state.jobs_issued, at_ns, *fields)


def give_lanes(state: SchedulerState, jobs: Sequence[Evaluate | Generate | Calibrate]) -> SchedulerState:
    """Lanes hold these new jobs, and are not idle any more."""
    lanes = list(state.lanes)
    for job in jobs:
        lanes[job.lane] = replace(lanes[job.lane], job=job)
    return replace(
        state,
        lanes=tuple(lanes),
        idle=tuple(index for index in state.idle if lanes[index].job is None),
        jobs_issued=state.jobs_issued + len(jobs),
    )


def give_trainer(state: SchedulerState, at_ns: int, kind: type[TrainerJob], *fields: object) -> Outcome:
    """The trainer gets a new job, after which it is free."""
    state, job = issue(state, at_ns, kind, *fields)
    return replace(state, trainer=Busy(job)), (job,)


def free_trainer(state: SchedulerState, result: Result) -> SchedulerState:
    """The trainer has answered its job."""
    assert isinstance(state.trainer, Busy) and state.trainer.job == result.job, f"{result} answers no job it holds"
    return replace(state, trainer=Free())


def reconsider_help(state: SchedulerState) -> SchedulerState:
    """Makes a waiting trainer decide again, because a slice has become available."""
    return replace(state, trainer=Free()) if state.trainer == Free(bubble_decided=True) else state


def put_step(state: SchedulerState, step: StepProgress) -> SchedulerState:
    steps = tuple(step if step.index == other.index else other for other in state.steps)
    return replace(state, steps=steps)


def put_lane(state: SchedulerState, lane: Lane) -> SchedulerState:
    return replace(state, lanes=lanes_with(state, lane))


def lanes_with(state: SchedulerState, lane: Lane) -> tuple[Lane, ...]:
    """The lanes with one of them replaced or, if it is new, added."""
    lanes = list(state.lanes)
    lanes[lane.index : lane.index + 1] = [lane]
    return tuple(lanes)


def put_group(step: StepProgress, index: int, group: GroupProgress) -> tuple[GroupProgress, ...]:
    """The step's groups with one of them replaced."""
    return (*step.groups[:index], group, *step.groups[index + 1 :])


def open_step(state: SchedulerState, index: int) -> StepProgress | None:
    """The open step with this index, or None if it is committed or not open yet."""
    for step in state.steps:
        if step.index == index:
            return step
    return None


def is_wanted(state: SchedulerState, piece: Slice | HeldOutChunk) -> bool:
    """Whether scores of these samples are still of use: not after a quarantine or an abandoned evaluation."""
    if isinstance(piece, HeldOutChunk):
        return find_evaluation(state, piece.version) is not None
    for step in state.steps:
        if step.index == piece.step:
            return not step.groups[piece.group].retired
    return False


def find_evaluation(state: SchedulerState, version: int) -> EvaluationProgress | None:
    """The open evaluation of a version."""
    return next((each for each in state.evaluations if each.version == version), None)


def put_evaluation(state: SchedulerState, evaluation: EvaluationProgress) -> SchedulerState:
    """The state with one evaluation replaced, or removed if it is complete."""
    done = evaluation.sampled and not evaluation.unscored
    return replace(
        state,
        evaluations=tuple(
            evaluation if each.version == evaluation.version else each
            for each in state.evaluations
            if not (done and each.version == evaluation.version)
        ),
    )
