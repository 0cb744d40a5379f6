"""Weights & Biases. Where it sends things, or whether, is for the package's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from digenrl.metrics.step_metrics import Evaluation
from digenrl.run_folder.folder import RunFolder


class WandbSink:
    """Logs into a run of `wandb`; on the axis are the optimizer steps done."""

    def __init__(self, wandb: Any, run: Any, run_folder: Path) -> None:
        self._wandb, self._run, self._run_folder = wandb, run, run_folder

    def step(self, numbers: Mapping[str, float]) -> None:
        """All numbers at once."""
        self._run.log(dict(numbers), step=int(numbers["version"]))

    def evaluation(self, evaluation: Evaluation) -> None:
        """All numbers and the grid at once."""
        content: dict[str, Any] = {f"evaluation/{name}": number for name, number in evaluation.numbers.items()}
        if evaluation.grid is not None:
            content["evaluation/samples"] = self._wandb.Image(str(self._run_folder / evaluation.grid))
        self._run.log(content, step=evaluation.steps_done)

    def close(self) -> None:
        """Waits until everything is sent, or kept for `wandb sync` if there is no network."""
        self._run.finish()


def open_wandb(folder: RunFolder, project: str) -> WandbSink:
    """A run of this project under the folder's name; going on with a run goes on with the same one there."""
    wandb = import_module("wandb")  # an extra; `check_logging` has made sure that it is there

    started = folder.info.started.strftime("%Y%m%d-%H%M%S")
    run = wandb.init(
        project=project,
        name=folder.path.name,
        id=f"{folder.path.name}-{started}",
        resume="allow",
        dir=str(folder.path),
        config=folder.recipe.model_dump(mode="json"),
    )
    return WandbSink(wandb, run, folder.path)
