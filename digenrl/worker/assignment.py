"""What a worker is told when it starts. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from digenrl.config.recipe import Recipe

TRAINER, ENCODER = "trainer", "encoder"

Duty = Literal["encode", "generate", "score", "learn"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """A worker's place among those that train together. The epoch is new whenever they start again."""

    index: int
    count: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who does what, where.

    `exchange` is the folder where workers of one machine leave tensors; workers of a cluster have none. `cores`
    pins a worker on a CPU. A trainer may begin from a `checkpoint`. `pool` is the recipe's pool of generators that
    the worker is of, and `ranks` its place in a trainer of several processes. Files are written into `run`.
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
    ranks: Ranks | None = None
    run: Path | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to work on."""

    cores: tuple[int, ...]
    cuda_devices: int = 0


@dataclass(frozen=True, slots=True)
class Workers:
    """All workers of a run. In mode colocated the trainer does everything but to score.

    `reserve` are generators that join while the run goes on, as soon as there is room for them.
    """

    trainer: Assignment
    generators: tuple[Assignment, ...] = ()
    rewards: tuple[Assignment, ...] = ()
    encoder: Assignment | None = None
    reserve: tuple[Assignment, ...] = ()

    def everybody(self) -> tuple[Assignment, ...]:
        """Who is there from the beginning, the slowest to load first."""
        encoder = () if self.encoder is None else (self.encoder,)
        return (self.trainer, *self.generators, *self.rewards, *encoder)


def rank_names(assignment: Assignment) -> list[str]:
    """The processes that a worker is made of; most are one, under their own name."""
    count = assignment.recipe.lanes.ranks if "learn" in assignment.duties else 1
    return [assignment.name] if count == 1 else [f"{assignment.name}/{index}" for index in range(count)]


def own_slice(assignment: Assignment, unit: int) -> int:
    """How many samples a generator makes at once: its pool's number, or one slice."""
    pools = assignment.recipe.cluster.generators
    own = next((pool.slice for pool in pools if pool.name == assignment.pool), None)
    return own or unit


def rank_device(device: str, rank: int) -> str:
    """Where a rank computes: the first on the device itself, the others on those that follow."""
    kind, colon, index = device.partition(":")
    return f"{kind}:{int(index) + rank}" if colon else device


def threads_per_worker(recipe: Recipe, machine: Machine) -> int:
    """Threads of each worker on a CPU: its share of the cores."""
    if isinstance(recipe.lanes.threads, int):
        return recipe.lanes.threads
    return max(1, len(machine.cores) // lane_count(recipe)) if runs_on_cpu(recipe, machine) else 4


def runs_on_cpu(recipe: Recipe, machine: Machine) -> bool:
    return recipe.lanes.device == "cpu" or (recipe.lanes.device == "auto" and machine.cuda_devices == 0)


def lane_count(recipe: Recipe) -> int:
    """Generators and the trainer's ranks: those who compute all the time."""
    if recipe.topology.one_process:
        return 1
    generators = recipe.lanes.generators
    return recipe.lanes.ranks + (generators if isinstance(generators, int) else len(generators))
