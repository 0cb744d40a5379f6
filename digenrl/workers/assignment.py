"""What a worker is told when it starts. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from digenrl.config.recipe import Recipe

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
