"""The trace schema, for simulated and live runs alike: what every lane did, and when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from digenrl.records import (
    Calibrate,
    Commit,
    Evaluate,
    Job,
    LaneJob,
    Restore,
    Save,
    SendGradients,
    SwitchRole,
    TakeUpdate,
    Train,
)

TRAINER_LANE: Final = "trainer"  # the row of the trainer as one unit; its helper lanes have their own rows
GENERATOR_POOL: Final = "generator"
REWARD_POOL: Final = "reward"
TRAINER_POOL: Final = "trainer"
POOLS: Final = (GENERATOR_POOL, REWARD_POOL, TRAINER_POOL)  # in the order of a trace's rows


class Work(StrEnum):
    """The kinds of work; a gap between spans is idle time, a bubble."""

    GENERATE = "generate"
    SCORE = "score"
    TRAIN = "train"
    COMMIT = "commit"
    PUBLISH = "publish"
    HELP = "help"
    SWITCH = "switch"
    EVALUATE = "evaluate"
    SAVE = "save"
    RESTORE = "restore"
    CALIBRATE = "calibrate"
    SEND = "send"


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one lane, in whole nanoseconds from the start of the run.

    `step`, `group`, `first` and `size` identify the samples: `first` up to `first + size - 1` of a group.
    Work that belongs to no group (commit, publish, switch, evaluate, save, calibrate, send) has `group` -1 and
    `size` 0.
    `version` is the weight version used; a generated slice is stale when its version is below its step.

    >>> Span("a100-0", Work.GENERATE, 0, 1_700_000_000, step=1, group=0, first=2, size=2, version=0).stale
    True
    """

    lane: str
    work: Work
    start_ns: int
    end_ns: int
    step: int
    group: int = -1
    first: int = 0
    size: int = 0
    version: int = 0

    @property
    def stale(self) -> bool:
        """Whether the samples were generated for a step newer than the weights used (TCSS)."""
        return self.work in (Work.GENERATE, Work.HELP) and self.version < self.step


TRAINER_WORK: dict[type[Job], Work] = {
    Train: Work.TRAIN,
    Commit: Work.COMMIT,
    TakeUpdate: Work.COMMIT,
    Save: Work.SAVE,
    SwitchRole: Work.SWITCH,
    Restore: Work.RESTORE,
}


_LANE_WORK: dict[type[Job], Work] = {
    Calibrate: Work.CALIBRATE,
    Evaluate: Work.EVALUATE,
    Train: Work.TRAIN,
    SendGradients: Work.SEND,
}


def lane_work(job: LaneJob, helps: bool) -> Work:
    """The kind of work of a lane's job; `helps` for one of the trainer's lanes."""
    return _LANE_WORK.get(type(job), Work.HELP if helps else Work.GENERATE)


@dataclass(frozen=True, slots=True)
class LaneInfo:
    """One row of the trace: its name, its pool, and when it joined and left.

    A lane that stayed to the end of the run has no `left_ns`. Before it joined and after it left it is not idle.
    """

    name: str
    pool: str  # GENERATOR_POOL, REWARD_POOL or TRAINER_POOL
    joined_ns: int = 0
    left_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """All spans of a run, ordered by start.

    Each helper lane of the trainer has its own row, with its `help` spans; the row "trainer" shows training,
    commits, saves and the switches around help. With `shared_cards` (colocated) generators and trainer take turns
    on the same cards: every generator lane's card also does the work of the row "trainer".

    With `shares_work` every card acts alone, and both generates and trains: generator lanes also have `train` and
    `send` spans, the helper lanes have the `help` and `train` spans of the trainer's cards, and the row "trainer"
    shows only what these do together, commits and saves.
    """

    lanes: tuple[LaneInfo, ...]
    spans: tuple[Span, ...]
    end_ns: int
    shared_cards: bool = False
    shares_work: bool = False
