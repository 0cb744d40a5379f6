"""Where a run's numbers go: its own files always, TensorBoard and Weights & Biases when the recipe says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from digenrl.config.reading import ConfigError
from digenrl.config.recipe import LoggingSettings
from digenrl.metrics.step_metrics import Evaluation, MetricSink
from digenrl.run_folder.folder import RunFolder, RunLines
from digenrl.run_folder.lines import JsonLines


class FileSink:
    """metrics.jsonl and evaluations.jsonl. JSON knows no NaN and no infinity: these are written as null."""

    def __init__(self, metrics: JsonLines, evaluations: JsonLines) -> None:
        self._metrics = metrics
        self._evaluations = evaluations

    def step(self, numbers: Mapping[str, float]) -> None:
        """One line."""
        self._metrics.append(json_numbers(numbers))

    def evaluation(self, evaluation: Evaluation) -> None:
        """One line."""
        self._evaluations.append(evaluation_line(evaluation))

    def close(self) -> None:
        """The files are closed by whoever opened them."""


def json_numbers(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """The numbers as JSON can say them.

    >>> json_numbers({"kl": float("nan"), "step": 3})
    {'kl': None, 'step': 3}
    """
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def evaluation_line(evaluation: Evaluation) -> dict[str, object]:
    """An evaluation as a flat mapping."""
    line: dict[str, object] = {"step": evaluation.steps_done, "at_s": evaluation.at_s, "count": evaluation.count}
    line |= json_numbers(evaluation.numbers)
    return line if evaluation.grid is None else {**line, "grid": evaluation.grid}


def check_logging(settings: LoggingSettings) -> None:
    """Complains before a run begins if a package that it would log with is not installed."""
    if settings.tensorboard:
        _needed("tensorboard", "logging.tensorboard: true", "install it, or set it to false")
    if settings.wandb is not None:
        _needed("wandb", f"logging.wandb: {settings.wandb}", "install digenrl[wandb], or leave it out")


def open_sinks(
    folder: RunFolder, lines: RunLines, steps_done: int, wall_clock: Callable[[], float]
) -> tuple[MetricSink, ...]:
    """Everything that the recipe asks for; `steps_done` are the optimizer steps before this process began."""
    settings = folder.recipe.logging
    check_logging(settings)
    sinks: list[MetricSink] = [FileSink(lines.metrics, lines.evaluations)]
    # Imported only when asked for: each takes a second or part of one to load.
    if settings.tensorboard:
        from digenrl.metrics.tensorboard_sink import TensorBoardSink

        sinks.append(TensorBoardSink(folder.path, steps_done, wall_clock))
    if settings.wandb is not None:
        from digenrl.metrics.wandb_sink import open_wandb

        sinks.append(open_wandb(folder, settings.wandb))
    return tuple(sinks)


def _needed(package: str, asked: str, remedy: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{asked} needs the package '{package}', which is not installed; {remedy}")
