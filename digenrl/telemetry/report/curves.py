"""Which curves the page shows, in which order, and under which titles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from digenrl.telemetry.report.records import Evaluation, RunRecord, StepMetrics

_PART = "reward/"

Points: TypeAlias = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: `y` has a value or a gap for every x; `spread` is the half width of a band around it."""

    name: str
    y: Points
    spread: Points | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one x axis, which counts optimizer steps."""

    title: str
    x: tuple[int, ...]
    series: tuple[Series, ...]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class _Planned:
    title: str
    names: Mapping[str, str]  # metric -> its name in the legend
    unit: str = ""


_HEALTH = (
    _Planned("Samples per second", {"samples_per_s": "samples/s"}),
    _Planned("Gradient norm", {"gradient_norm": "gradient norm"}),
    _Planned("KL to the reference", {"kl": "KL"}),
    _Planned("Policy ratio", {"ratio_mean": "mean", "ratio_max": "largest"}),
    _Planned("Clipped ratios", {"clip_fraction": "clipped"}, "share"),
    _Planned("Log-probability mismatch", {"log_prob_mismatch": "mismatch"}),
    _Planned("Stale and helped samples", {"stale_share": "stale", "helped_share": "helped"}, "share"),
    _Planned("Groups without spread", {"zero_spread_groups": "groups"}),
)
# Shown elsewhere on the page, or no measurement.
_NOT_PLOTTED = frozenset({"reward_mean", "reward_std", "step_s", "predicted_step_s", "at_s", "version", "samples"})


def reward_charts(run: RunRecord) -> tuple[Chart, ...]:
    """The training reward with its spread; none if the run has no reward yet."""
    mean = _column(run.steps, "reward_mean")
    if not _any(mean):
        return ()
    spread = _column(run.steps, "reward_std")
    series = Series("mean of the step's samples", mean, spread if _any(spread) else None)
    return (Chart("Training reward", tuple(step.step for step in run.steps), (series,)),)


def part_charts(run: RunRecord) -> tuple[Chart, ...]:
    """One chart for each part of the training reward."""
    x = tuple(step.step for step in run.steps)
    parts = [name for name in _names(run.steps) if name.startswith(_PART)]
    return tuple(
        Chart(name.removeprefix(_PART), x, (Series(name.removeprefix(_PART), _column(run.steps, name)),))
        for name in parts
    )


def held_out_charts(run: RunRecord) -> tuple[Chart, ...]:
    """One chart for each held-out number; x is the number of optimizer steps done."""
    x = tuple(evaluation.step for evaluation in run.evaluations)
    charts = []
    for name in _names(run.evaluations):
        if name == "reward_mean" or name.startswith(_PART):
            title = "Held-out reward" if name == "reward_mean" else f"Held-out {name.removeprefix(_PART)}"
            charts.append(Chart(title, x, (Series(title, _column(run.evaluations, name)),)))
    return tuple(charts)


def health_charts(run: RunRecord) -> tuple[Chart, ...]:
    """Speed, gradients and policy drift, as far as the run measured them."""
    x = tuple(step.step for step in run.steps)
    charts = []
    for planned in _HEALTH:
        columns = {words: _column(run.steps, name) for name, words in planned.names.items()}
        series = tuple(Series(words, column) for words, column in columns.items() if _any(column))
        if series:
            charts.append(Chart(planned.title, x, series, planned.unit))
    return tuple(charts)


def other_charts(run: RunRecord) -> tuple[Chart, ...]:
    """Whatever else the run wrote down, under its own name."""
    x = tuple(step.step for step in run.steps)
    shown = _NOT_PLOTTED.union(*(planned.names for planned in _HEALTH))
    names = [name for name in _names(run.steps) if name not in shown and not name.startswith(_PART)]
    return tuple(Chart(name, x, (Series(name, _column(run.steps, name)),)) for name in names)


def _names(rows: Iterable[StepMetrics | Evaluation]) -> list[str]:
    """Every metric's name, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def _column(rows: Iterable[StepMetrics | Evaluation], name: str) -> Points:
    return tuple(row.values.get(name) for row in rows)


def _any(points: Points) -> bool:
    return any(point is not None for point in points)
