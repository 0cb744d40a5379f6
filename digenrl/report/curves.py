"""The curves of the page: their order and titles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from digenrl.report.headline import repeats_reward, reward_names
from digenrl.run_folder.metric_lines import EvaluationRecord, StepRecord
from digenrl.run_folder.reading import RunRecord

_PART = "reward/"

Points: TypeAlias = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: `y` has a value or None for every x; `spread` is the half width of a band around it."""

    name: str
    y: Points
    spread: Points | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over optimizer steps."""

    title: str
    x: tuple[int, ...]
    series: tuple[Series, ...]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class _ChartSpec:
    title: str
    labels: Mapping[str, str]  # metric -> its label in the legend
    unit: str = ""


_HEALTH = (
    _ChartSpec("Samples per second", {"samples_per_s": "samples/s"}),
    _ChartSpec("Model FLOP utilization", {"generation_mfu": "generation", "training_mfu": "training"}, "share"),
    _ChartSpec("Gradient norm", {"gradient_norm": "gradient norm"}),
    _ChartSpec("Better samples preferred", {"preferred": "share of comparisons"}, "share"),
    _ChartSpec("KL to the reference", {"kl": "KL"}),
    _ChartSpec("Policy ratio", {"ratio_mean": "mean", "ratio_max": "largest"}),
    _ChartSpec("Clipped ratios", {"clip_fraction": "clipped"}, "share"),
    _ChartSpec("Log-probability mismatch", {"log_prob_mismatch": "mismatch"}),
    _ChartSpec(
        "Shares of samples",
        {"stale_share": "stale", "helped_share": "helped", "assisted_share": "assisted"},
        "share",
    ),
    _ChartSpec("Groups without spread", {"zero_spread_groups": "groups"}),
)
# Shown elsewhere on the page, or not a measurement.
_NOT_PLOTTED = frozenset({"reward_mean", "reward_std", "step_s", "predicted_step_s", "at_s", "version", "samples"})


def _title(what: str, rewards: str) -> str:
    return f"{what}: {rewards}" if rewards else what


def reward_charts(run: RunRecord) -> tuple[Chart, ...]:
    """The training reward with its standard deviation; none before the first reward, or if it is given."""
    mean = _column(run.steps, "reward_mean")
    if not _any(mean) or run.recipe.rewards_are_given:
        return ()
    spread = _column(run.steps, "reward_std")
    series = Series("mean of the step's samples", mean, spread if _any(spread) else None)
    title = _title("Training reward", reward_names(run.recipe)["training"])
    return (Chart(title, tuple(step.step for step in run.steps), (series,)),)


def part_charts(run: RunRecord) -> tuple[Chart, ...]:
    """One chart per part of the training reward that does not equal the reward."""
    x = tuple(step.step for step in run.steps)
    parts = [name for name in _names(run.steps) if name.startswith(_PART) and not run.recipe.rewards_are_given]
    parts = [name for name in parts if not repeats_reward(run.steps, name)]
    return tuple(
        Chart(name.removeprefix(_PART), x, (Series(name.removeprefix(_PART), _column(run.steps, name)),))
        for name in parts
    )


def held_out_charts(run: RunRecord) -> tuple[Chart, ...]:
    """One chart per held-out metric that does not equal the reward; x is the number of optimizer steps done.

    Values before and after a change of the settings of evaluations are not comparable: each has its own curve.
    """
    x = tuple(evaluation.steps_done for evaluation in run.evaluations)
    charts = []
    for name in _names(run.evaluations):
        if (name == "reward_mean" or name.startswith(_PART)) and not repeats_reward(run.evaluations, name):
            title = f"Held-out {name.removeprefix(_PART)}"
            if name == "reward_mean":
                title = _title("Held-out reward", reward_names(run.recipe)["held_out"])
            charts.append(Chart(title, x, _series_by_settings(title, run.evaluations, name)))
    return tuple(charts)


def _series_by_settings(title: str, rows: Sequence[EvaluationRecord], name: str) -> tuple[Series, ...]:
    column = _column(rows, name)
    starts = [at for at, row in enumerate(rows) if at == 0 or row.settings != rows[at - 1].settings]
    if len(starts) == 1:
        return (Series(title, column),)
    all_series = []
    for start, end in pairwise([*starts, len(rows)]):
        alone = (None,) * start + column[start:end] + (None,) * (len(rows) - end)
        all_series.append(Series(f"settings from step {rows[start].steps_done}", alone))
    return tuple(series for series in all_series if _any(series.y))


def health_charts(run: RunRecord) -> tuple[Chart, ...]:
    """Speed, gradients and policy drift, as far as the run measured them."""
    x = tuple(step.step for step in run.steps)
    charts = []
    for spec in _HEALTH:
        columns = {label: _column(run.steps, name) for name, label in spec.labels.items()}
        series = tuple(Series(label, column) for label, column in columns.items() if _any(column))
        if series:
            charts.append(Chart(spec.title, x, series, spec.unit))
    return tuple(charts)


def other_charts(run: RunRecord) -> tuple[Chart, ...]:
    """All other metrics of the run, under their own names."""
    x = tuple(step.step for step in run.steps)
    shown = _NOT_PLOTTED.union(*(spec.labels for spec in _HEALTH))
    names = [name for name in _names(run.steps) if name not in shown and not name.startswith(_PART)]
    return tuple(Chart(name, x, (Series(name, _column(run.steps, name)),)) for name in names)


def _names(rows: Iterable[StepRecord | EvaluationRecord]) -> list[str]:
    """The names of all metrics, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def _column(rows: Iterable[StepRecord | EvaluationRecord], name: str) -> Points:
    return tuple(row.values.get(name) for row in rows)


def _any(points: Points) -> bool:
    return any(point is not None for point in points)
