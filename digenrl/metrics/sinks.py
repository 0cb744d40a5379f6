"""The sinks of a run: always its own files; TensorBoard and Weights & Biases if the recipe asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.recipe import LoggingSettings
from digenrl.metrics.step_metrics import MetricSink
from digenrl.run_folder.folder import RunFolder, RunLines
from digenrl.run_folder.lines import JsonLines
from digenrl.run_folder.metric_lines import EvaluationRecord, evaluation_line, step_line


class FileSink:
    """Writes metrics.jsonl and evaluations.jsonl; it does not own the open files."""

    def __init__(self, metrics: JsonLines, evaluations: JsonLines) -> None:
        self._metrics = metrics
        self._evaluations = evaluations

    def step(self, metrics: Mapping[str, float]) -> None:
        self._metrics.append(step_line(metrics))

    def evaluation(self, evaluation: EvaluationRecord) -> None:
        self._evaluations.append(evaluation_line(evaluation))

    def close(self) -> None:
        pass


def check_logging(settings: LoggingSettings) -> None:
    """Raises ConfigError if a package that the logging settings need is not installed."""
    if settings.tensorboard:
        _check_installed("tensorboard", "logging.tensorboard: true", "install it, or set it to false")
    if settings.wandb is not None:
        _check_installed("wandb", f"logging.wandb: {settings.wandb}", "install digenrl[wandb], or leave it out")


def open_sinks(
    folder: RunFolder, lines: RunLines, steps_done: int, wall_clock: Callable[[], float]
) -> tuple[MetricSink, ...]:
    """Opens all sinks of the recipe; `steps_done` is the number of optimizer steps before this process started."""
    settings = folder.recipe.logging
    check_logging(settings)
    sinks: list[MetricSink] = [FileSink(lines.metrics, lines.evaluations)]
    # Imported on demand: each takes up to a second to load.
    if settings.tensorboard:
        from digenrl.metrics.tensorboard_sink import TensorBoardSink

        sinks.append(TensorBoardSink(folder, steps_done, wall_clock))
    if settings.wandb is not None:
        from digenrl.metrics.wandb_sink import open_wandb

        sinks.append(open_wandb(folder, settings.wandb))
    return tuple(sinks)


def _check_installed(package: str, setting: str, remedy: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{setting} needs the package '{package}', which is not installed; {remedy}")
