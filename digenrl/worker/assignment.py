"""A worker's assignment, and its first message. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from digenrl.config.recipes.recipe import Recipe
from digenrl.training.ranks.rank import Rank

TRAINER, ENCODER = "trainer", "encoder"

Duty = Literal["encode", "generate", "score", "train"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """One worker: its duties and its device.

    `exchange` is the folder where workers of one machine leave tensors; workers of a cluster have none. `cores`
    pins a worker to CPU cores. A trainer may start from a `checkpoint`. `pool` is the worker's generator pool in
    the recipe, and `rank` its place in a worker of several processes, whose every start has a new `epoch`. Files
    are written into `run`.
    """

    name: str
    duties: frozenset[Duty]
    device: str
    recipe: Recipe
    exchange: Path | None
    cores: tuple[int, ...] | None = None
    checkpoint: Path | None = None
    pool: str | None = None
    slowdown: float = 1.0
    rank: Rank | None = None
    epoch: int = 0
    run: Path | None = None

    @property
    def commits(self) -> bool:
        """Whether this is the trainer or one of its ranks, and not a generator that also trains."""
        return self.name.partition("/")[0] == TRAINER


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has loaded everything it needs. A `remark` is for the user."""

    remark: str = ""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The worker could not be built. A `user_error` is explained by `reason`; else see `details`."""

    reason: str
    user_error: bool = False
    details: str = ""


@dataclass(frozen=True, slots=True)
class PeersLost:
    """A rank could not do its job because others have ended or do not answer. Its log has the `details`."""

    reason: str
    details: str = ""


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """The worker cannot use its device any more: CUDA errors last as long as their process. See the `details`."""

    reason: str
    details: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of this machine."""

    cores: tuple[int, ...]
    cuda_devices: int = 0


@dataclass(frozen=True, slots=True)
class Workers:
    """All workers of a run. In mode colocated the trainer does everything except scoring.

    `reserve` are generators that join during the run, as soon as there is room for them.
    """

    trainer: Assignment
    generators: tuple[Assignment, ...] = ()
    rewards: tuple[Assignment, ...] = ()
    encoder: Assignment | None = None
    reserve: tuple[Assignment, ...] = ()

    @property
    def encoder_name(self) -> str:
        return TRAINER if self.encoder is None else ENCODER

    @property
    def generator_names(self) -> list[str]:
        """The workers that generate, helpers excluded: the generators, or the one worker that does everything."""
        return [each.name for each in self.generators] or [TRAINER]

    @property
    def reward_names(self) -> list[str]:
        """The workers that only score; none if generators score what they make."""
        return [each.name for each in self.rewards]

    def initial(self) -> tuple[Assignment, ...]:
        """Those that start with the run, the slowest to load first."""
        encoder = () if self.encoder is None else (self.encoder,)
        return (self.trainer, *self.generators, *self.rewards, *encoder)

    def by_name(self) -> dict[str, Assignment]:
        """All assignments, those in reserve included."""
        return {each.name: each for each in (*self.initial(), *self.reserve)}


def rank_names(assignment: Assignment) -> list[str]:
    """The processes of a worker: one of the same name, or one per rank."""
    lanes, duties = assignment.recipe.lanes, assignment.duties
    count = lanes.ranks if "train" in duties else lanes.cards_per_generator if "generate" in duties else 1
    return [assignment.name] if count == 1 else [f"{assignment.name}/{index}" for index in range(count)]


def cards_per_sample(assignment: Assignment) -> int:
    """How many of a worker's ranks compute each sample together."""
    lanes, duties = assignment.recipe.lanes, assignment.duties
    return (
        lanes.cards_per_replica if "train" in duties else lanes.cards_per_generator if "generate" in duties else 1
    )


def own_slice(assignment: Assignment, unit: int) -> int:
    """How many samples a generator makes at once: its pool's setting, or one slice."""
    pools = assignment.recipe.cluster.generators
    own = next((pool.slice for pool in pools if pool.name == assignment.pool), None)
    return own or unit


def rank_device(device: str, rank: int) -> str:
    """The device of a rank: the assignment's own for the first, the following ones for the others."""
    kind, colon, index = device.partition(":")
    return f"{kind}:{int(index) + rank}" if colon else device


def threads_per_worker(recipe: Recipe, machine: Machine) -> int:
    """Threads per worker. On a CPU, each gets an equal share of the cores."""
    if isinstance(recipe.lanes.threads, int):
        return recipe.lanes.threads
    return max(1, len(machine.cores) // lane_count(recipe)) if runs_on_cpu(recipe, machine) else 4


def runs_on_cpu(recipe: Recipe, machine: Machine) -> bool:
    return recipe.lanes.device == "cpu" or (recipe.lanes.device == "auto" and machine.cuda_devices == 0)


def lane_count(recipe: Recipe) -> int:
    """The processes of generators and of the trainer, which compute all the time."""
    if recipe.topology.one_process:
        return 1
    generators = recipe.lanes.generators
    count = generators if isinstance(generators, int) else len(generators)
    return recipe.lanes.ranks + count * recipe.lanes.cards_per_generator
