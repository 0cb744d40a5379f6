"""Weights & Biases. The package's own settings decide where it sends data, or whether it does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from digenrl.config.reading import ConfigError, one_line
from digenrl.run_folder.folder import RunFolder
from digenrl.run_folder.metric_lines import EvaluationRecord

_FORBIDDEN = re.compile(r"[:;,#?/'\\%]")  # in the id of a run
_LONGEST_NAME = 48  # of a folder, in an id


class WandbSink:
    """Logs to a `wandb` run; the x axis counts optimizer steps done, in the metric `version`.

    It is not wandb's own step, below which nothing can be logged any more: an evaluation may end late, and a
    resumed run repeats steps.
    """

    def __init__(self, wandb: Any, run: Any, run_folder: Path) -> None:
        self._wandb, self._run, self._run_folder = wandb, run, run_folder
        run.define_metric("*", step_metric="version")

    def step(self, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics))

    def evaluation(self, evaluation: EvaluationRecord) -> None:
        content: dict[str, Any] = {f"evaluation/{name}": value for name, value in evaluation.values.items()}
        content["version"] = evaluation.steps_done
        if evaluation.grid is not None:
            content["evaluation/samples"] = self._wandb.Image(str(self._run_folder / evaluation.grid))
        self._run.log(content)

    def close(self) -> None:
        """Waits until everything is sent, or stored for `wandb sync` if there is no network."""
        self._run.finish()


def open_wandb(folder: RunFolder, project: str) -> WandbSink:
    """Opens a run named after the folder in this project; a resumed run continues the same `wandb` run."""
    wandb = import_module("wandb")  # an extra, which `check_logging` has checked for

    name, started = folder.path.resolve().name, folder.info.started.strftime("%Y%m%d-%H%M%S")
    try:
        run = wandb.init(
            project=project,
            name=name,
            id=f"{_FORBIDDEN.sub('-', name)[:_LONGEST_NAME]}-{started}",
            resume="allow",
            dir=str(folder.path),
            config=folder.recipe.model_dump(mode="json"),
        )
    except wandb.Error as error:
        raise ConfigError(
            f"logging.wandb: {one_line(error)}; log in with `wandb login`, keep the data here with "
            "WANDB_MODE=offline, or set it to null"
        ) from error
    return WandbSink(wandb, run, folder.path)
