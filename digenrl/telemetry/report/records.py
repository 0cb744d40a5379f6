"""What a run left in its folder, as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.config.recipe import Recipe
from digenrl.telemetry.trace import Trace


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The numbers of one optimizer step, by name; what is absent or not finite has no entry."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Cell:
    """What one image of a grid was asked to show, and how well it did."""

    prompt: str
    reward: float | None
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SampleGrid:
    """One picture of an evaluation's first samples; `cells` go row by row, and are empty if nobody wrote them.

    `gap` pixels lie between neighbours, and around them all.
    """

    image: Path
    columns: int
    gap: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out numbers after `step` optimizer steps; `grid` is None where the picture is gone."""

    step: int
    values: Mapping[str, float]
    grid: SampleGrid | None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All of a run's folder that the report shows. Steps and evaluations are in order, each step once.

    `status` is running, finished, interrupted or failed. `devices` names the device of every lane. `opening` is
    the profile that the run started with, as it was written.
    """

    name: str
    status: str
    started: str
    digenrl: str
    recipe: Recipe
    recipe_text: str
    devices: Mapping[str, str]
    opening: Mapping[str, Any]
    trace: Trace
    steps: tuple[StepMetrics, ...]
    evaluations: tuple[Evaluation, ...]
