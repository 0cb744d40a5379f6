"""Real runs for benchmarks: the demo's model with a cheap reward, driven from this process."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: the comparisons assume one core per lane

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from digenrl.config.reading import parse_model
from digenrl.config.recipes.recipe import Recipe
from digenrl.console.live_view import RunView
from digenrl.demo import train_prompts
from digenrl.records import Action, Event
from digenrl.run_folder.folder import RunFolder
from digenrl.runs.training import check_recipe, train
from digenrl.scheduling import SchedulerState


@dataclass
class StepLog(RunView):
    """A view that prints nothing and records the metrics of every step, with the CPU time at its end.

    `cpu_s` is the CPU time of this process, `loop_s` that of the thread that drives the run.
    """

    steps: list[Mapping[str, float]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    loop_s: list[float] = field(default_factory=list)
    states: list[SchedulerState] = field(default_factory=list)  # only the latest

    def step(self, metrics: Mapping[str, float]) -> None:
        self.steps.append(dict(metrics))
        self.cpu_s.append(time.process_time())
        self.loop_s.append(time.thread_time())

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        self.states[:] = [state]


@dataclass(frozen=True)
class LiveRun:
    """A finished run."""

    recipe: Recipe
    folder: Path
    log: StepLog

    def steady_steps(self, skip: int = 2) -> list[Mapping[str, float]]:
        """The steps during which the pipeline is full: all except the first few and the last."""
        return self.log.steps[skip:-1]

    def spans(self) -> list[dict[str, Any]]:
        """The spans of all lanes."""
        return [json.loads(line) for line in (self.folder / "spans.jsonl").read_text().splitlines()]


def recipe(**changes: Any) -> Recipe:
    """Trains the demo's model with Flow-GRPO and a reward that costs little: poor JPEG compression."""
    content: dict[str, Any] = {
        "name": "benchmark",
        "steps": 8,
        "model": {"family": "sd3", "source": "demo", "guidance": 1},
        "prompts": {"path": str(train_prompts())},
        "rewards": [{"name": "jpeg_incompressibility"}],
        "sample": {"height": 32, "width": 64, "denoising_steps": 8},
        "batch": {"prompts": 6, "samples_per_prompt": 8, "slice": 4},
        "algorithm": {"name": "flow_grpo", "options": {"updates_per_batch": 1, "kl_weight": 0}},
        "training": {"learning_rate": 1e-6, "pack_size": 16},
        "lanes": {"device": "cpu", "rewards": 0, "threads": 1},
        "logging": {"tensorboard": False},
        "checkpoint": {"every": 1000},
    }
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(content.get(key), dict) else value
    return parse_model(Recipe, content)


def run(chosen: Recipe, folder: Path) -> LiveRun:
    """Runs a recipe to its end."""
    log = StepLog()
    backend = check_recipe(chosen)
    with closing(backend):
        train(RunFolder.create(folder, chosen, datetime.now(UTC)), backend, log)
    return LiveRun(chosen, folder, log)
