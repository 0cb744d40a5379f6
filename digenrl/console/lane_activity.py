"""What every lane is doing, according to the scheduler's state."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.records import (
    Calibrate,
    Commit,
    Evaluate,
    LaneJob,
    Save,
    SendGradients,
    Slice,
    SwitchRole,
    TakeUpdate,
    Train,
)
from digenrl.scheduling import SchedulerState
from digenrl.scheduling.state import Busy, Free, Lane, Restoring, SwitchingIn
from digenrl.telemetry.trace import (
    GENERATOR_POOL,
    REWARD_POOL,
    TRAINER_LANE,
    TRAINER_POOL,
    TRAINER_WORK,
    LaneInfo,
    Work,
    lane_work,
)

IDLE = "idle"
_ALONE = {Work.HELP: "generating", Work.TRAIN: "training", Work.EVALUATE: "evaluating"}


@dataclass(frozen=True, slots=True)
class Activity:
    """A lane and its work; `work` is None for an idle lane, and for one whose card works in another row."""

    lane: LaneInfo
    work: Work | None
    description: str
    since_ns: int | None = None


def lane_activity(state: SchedulerState) -> tuple[Activity, ...]:
    """One per present lane: generators, scorers, the trainer, its helpers."""
    lanes = [_lane(state, lane) for lane in state.present_lanes]
    scorers = [_scorer(state, index) for index in range(len(state.scorers))]
    generators = [each for each in lanes if each.lane.pool == GENERATOR_POOL]
    helpers = [each for each in lanes if each.lane.pool != GENERATOR_POOL]
    return (*generators, *scorers, _trainer(state), *helpers)


def _lane(state: SchedulerState, lane: Lane) -> Activity:
    helps = lane.helper and not state.terms.colocated
    info, job = LaneInfo(lane.name, TRAINER_POOL if helps else GENERATOR_POOL), lane.job
    if job is not None:
        return Activity(info, lane_work(job, helps), _description(job), job.issued_ns)
    shares_card = helps or state.terms.colocated
    trains = shares_card and isinstance(state.trainer, Busy | SwitchingIn)
    return Activity(info, None, "card is training" if trains else IDLE)


def _description(job: LaneJob) -> str:
    if isinstance(job, Evaluate):
        return f"version {job.chunk.version}"
    if isinstance(job, Calibrate):
        return "timing slices"
    if isinstance(job, SendGradients):
        return f"gradients of step {job.step}"
    stale = not isinstance(job, Train) and job.stale
    return f"step {job.slice.step} group {job.slice.group}{' stale' if stale else ''}"


def _scorer(state: SchedulerState, index: int) -> Activity:
    info, job = LaneInfo(f"reward-{index}", REWARD_POOL), state.scorers[index]
    if job is None:
        return Activity(info, None, IDLE)
    if not isinstance(job.piece, Slice):
        return Activity(info, Work.EVALUATE, f"version {job.piece.version}", job.issued_ns)
    return Activity(info, Work.SCORE, f"step {job.piece.step} group {job.piece.group}", job.issued_ns)


def _trainer(state: SchedulerState) -> Activity:
    info, trainer = LaneInfo(TRAINER_LANE, TRAINER_POOL), state.trainer
    if isinstance(trainer, Restoring):
        return Activity(info, Work.RESTORE, f"version {state.committed}")
    if isinstance(trainer, Busy | SwitchingIn):
        return Activity(info, TRAINER_WORK[type(trainer.job)], _description_of_trainers(trainer.job))
    return Activity(info, None, _work_of_cards(state) if isinstance(trainer, Free) else "cards are generating")


def _description_of_trainers(job: Train | Commit | TakeUpdate | Save | SwitchRole) -> str:
    if isinstance(job, Train):
        return f"step {job.slice.step} group {job.slice.group}"
    if isinstance(job, SwitchRole):
        return "to generating" if job.role == "generate" else "to training"
    return f"version {job.step}" if isinstance(job, Save) else f"step {job.step}"


def _work_of_cards(state: SchedulerState) -> str:
    """What the trainer's cards do, each on its own, while they do nothing together."""
    helps = not state.terms.colocated
    works = {lane_work(lane.job, helps) for lane in state.lanes if lane.helper and helps and lane.job is not None}
    words = [word for work, word in _ALONE.items() if work in works]
    return f"cards are {' and '.join(words)}" if words else IDLE
