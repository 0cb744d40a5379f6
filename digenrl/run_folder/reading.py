"""Reads everything in a run's folder. Files that the run has not written yet count as empty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from digenrl.config.recipes.recipe import Recipe
from digenrl.run_folder.folder import RunFolder, RunInfo
from digenrl.run_folder.grids import SampleGrid, read_grid
from digenrl.run_folder.metric_lines import EvaluationRecord, StepRecord, read_evaluations, read_steps
from digenrl.run_folder.spans import read_trace
from digenrl.telemetry.trace import LaneInfo, Trace


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of a run's folder. `grids` is keyed by the optimizer steps done, and lacks missing images."""

    folder: RunFolder
    recipe_text: str
    trace: Trace
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    grids: Mapping[int, SampleGrid]

    @property
    def info(self) -> RunInfo:
        """The content of run.json."""
        return self.folder.info

    @property
    def recipe(self) -> Recipe:
        """The recipe in config.yaml."""
        return self.folder.recipe

    @property
    def comparable_evaluations(self) -> tuple[EvaluationRecord, ...]:
        """The evaluations with the settings of the last one: a resumed run may have changed how it evaluates."""
        return tuple(each for each in self.evaluations if each.settings == self.evaluations[-1].settings)


def read_run(path: Path) -> RunRecord:
    """Reads a run's folder; raises ConfigError if it is not one, or is damaged."""
    folder = RunFolder.open(path)
    folder.info = folder.info.model_copy(update={"status": folder.actual_status()})
    recipe = folder.recipe
    lanes = [LaneInfo(lane.name, lane.pool, lane.joined_ns, lane.left_ns) for lane in folder.info.lanes]
    evaluations = read_evaluations(folder.evaluations)
    grids = {each.steps_done: read_grid(path / each.grid) for each in evaluations if each.grid is not None}
    return RunRecord(
        folder=folder,
        recipe_text=folder.config.read_text(encoding="utf-8"),
        trace=read_trace(
            folder.spans, lanes, shared_cards=recipe.topology.shares_cards, shares_work=_shares_work(folder)
        ),
        steps=tuple(read_steps(folder.metrics)),
        evaluations=evaluations,
        grids={steps_done: grid for steps_done, grid in grids.items() if grid is not None},
    )


def _shares_work(folder: RunFolder) -> bool:
    """Whether lanes generated and trained: with `tag: auto` a run may do without that."""
    terms = folder.info.initial_state.get("terms", {})
    return folder.recipe.shares_work and terms.get("assist", "both") == "both"
