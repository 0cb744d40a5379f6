"""What every lane is doing, according to the scheduler's state."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.scheduling import SchedulerState
from digenrl.scheduling.state import (
    BetweenRounds,
    Committing,
    Free,
    Generating,
    Helping,
    Lane,
    SwitchingIn,
    SwitchingOut,
    Training,
)
from digenrl.telemetry.trace import GENERATOR_POOL, REWARD_POOL, TRAINER_LANE, TRAINER_POOL, LaneInfo, Work

IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Activity:
    """A lane and its work; `work` is None for an idle lane, and for one whose card works in another row."""

    lane: LaneInfo
    work: Work | None
    description: str
    since_ns: int | None = None


def lane_activity(state: SchedulerState) -> tuple[Activity, ...]:
    """One per present lane: generators, scorers, the trainer, its helpers."""
    lanes = [_lane(state, lane) for lane in state.lanes if lane.present]
    scorers = [_scorer(state, index) for index in range(len(state.scorers))]
    generators = [each for each in lanes if each.lane.pool == GENERATOR_POOL]
    helpers = [each for each in lanes if each.lane.pool != GENERATOR_POOL]
    return (*generators, *scorers, _trainer(state), *helpers)


def _lane(state: SchedulerState, lane: Lane) -> Activity:
    helps = lane.helper and not state.terms.colocated
    info, lease = LaneInfo(lane.name, TRAINER_POOL if helps else GENERATOR_POOL), lane.lease
    if lease is not None:
        description = f"step {lease.slice.step} group {lease.slice.group}{' stale' if lease.stale else ''}"
        return Activity(info, Work.HELP if helps else Work.GENERATE, description, lease.started_ns)
    shares_card = helps or state.terms.colocated
    trains = shares_card and isinstance(state.trainer, Training | Committing | SwitchingIn | SwitchingOut)
    return Activity(info, None, "card is training" if trains else IDLE)


def _scorer(state: SchedulerState, index: int) -> Activity:
    info, job = LaneInfo(f"reward-{index}", REWARD_POOL), state.scorers[index]
    if job is None:
        return Activity(info, None, IDLE)
    return Activity(info, Work.SCORE, f"step {job.slice.step} group {job.slice.group}", job.started_ns)


def _trainer(state: SchedulerState) -> Activity:
    info, trainer = LaneInfo(TRAINER_LANE, TRAINER_POOL), state.trainer
    match trainer:
        case Training(slices):
            groups = sorted({piece.group for piece in slices})
            which = f"group {groups[0]}" if len(groups) == 1 else f"{len(groups)} groups"
            return Activity(info, Work.TRAIN, f"step {slices[0].step} {which}")
        case Committing():
            return Activity(info, Work.COMMIT, f"step {state.committed}")
        case SwitchingIn():
            return Activity(info, Work.SWITCH, "to generating")
        case SwitchingOut():
            return Activity(info, Work.SWITCH, "to training")
        case Helping() | BetweenRounds() | Generating():
            return Activity(info, None, "cards are generating")
        case Free():
            return Activity(info, None, IDLE)
