"""What a worker is told when it starts. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from digenrl.config.recipe import Recipe

Duty = Literal["encode", "generate", "score", "learn"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who does what, where. `cores` pins a worker on a CPU; a trainer may begin from a `checkpoint`."""

    name: str
    duties: frozenset[Duty]
    device: str
    recipe: Recipe
    exchange: Path
    cores: tuple[int, ...] | None = None
    checkpoint: Path | None = None
