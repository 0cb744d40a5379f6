"""The lines of metrics.jsonl, one per optimizer step, and of evaluations.jsonl, one per evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from digenrl.config.limits import MOST_STEPS
from digenrl.config.reading import ConfigError, shown
from digenrl.run_folder.lines import JsonLine, located_lines

LARGEST_METRIC = 1e100  # sums and products of metrics are finite


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The metrics of one optimizer step by name; those that are unknown or not finite have no entry."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """Held-out metrics of the model after `steps_done` optimizer steps.

    `values` has "reward_mean" and "reward/<part>"; `grid` is the path of the image grid inside the run's folder.
    Values can be compared if `settings` are equal, the hash of the settings of the evaluation.
    """

    steps_done: int
    at_s: float
    count: int
    values: Mapping[str, float]
    grid: str | None = None
    settings: str = ""


def step_line(values: Mapping[str, float]) -> dict[str, float | None]:
    """The metrics of a step as JSON, with null for values that are not finite or above LARGEST_METRIC.

    >>> step_line({"kl": float("nan"), "step": 3})
    {'kl': None, 'step': 3}
    """
    return {name: value if abs(value) <= LARGEST_METRIC else None for name, value in values.items()}


def evaluation_line(evaluation: EvaluationRecord) -> dict[str, object]:
    """An evaluation as a flat JSON object."""
    line: dict[str, object] = {"step": evaluation.steps_done, "at_s": evaluation.at_s, "count": evaluation.count}
    line |= step_line(evaluation.values)
    if evaluation.settings:
        line["settings"] = evaluation.settings
    return line if evaluation.grid is None else {**line, "grid": evaluation.grid}


def read_steps(path: Path, end: int | None = None) -> Iterator[StepRecord]:
    """All steps in order, or those before a byte. Where a resumed run repeated a step, the later line counts.

    The file, which may be large, is read twice, and only one line is in memory at a time.
    """
    starts: dict[int, int] = {}  # the byte of the line that counts, by step, in the order of these lines
    for line in _lines_before(path, end):
        starts.pop(_step(line), None)
        starts[_step(line)] = line.start
    lines = (line for line in _lines_before(path, end) if starts.get(_step(line)) == line.start)
    records = map(step_record, lines)
    in_order = list(starts) == sorted(starts)
    yield from records if in_order else sorted(records, key=lambda record: record.step)


def read_evaluations(path: Path, end: int | None = None) -> tuple[EvaluationRecord, ...]:
    """All evaluations in order, or those before a byte. Where a run repeated one, the later line counts."""
    by_step: dict[int, EvaluationRecord] = {}
    for line in _lines_before(path, end):
        record = evaluation_record(line)
        by_step[record.steps_done] = record
    return tuple(by_step[step] for step in sorted(by_step))


def step_record(line: JsonLine) -> StepRecord:
    """A line of metrics.jsonl; raises ConfigError if it is not one."""
    return StepRecord(_step(line), _finite_values(line, {"step"}))


def evaluation_record(line: JsonLine) -> EvaluationRecord:
    """A line of evaluations.jsonl; raises ConfigError if it is not one."""
    values = _finite_values(line, {"step", "grid", "settings"})
    at_s, count = values.pop("at_s", 0.0), int(values.pop("count", 0))
    settings = str(line.content.get("settings", ""))
    return EvaluationRecord(_step(line), at_s, count, values, _grid(line), settings)


def end_of_evaluations(path: Path, position: int, last_step: int) -> int:
    """The byte after `position` up to which evaluations are of versions up to `last_step`.

    An evaluation ends later than the commit of its version, so a checkpoint's position may lie before the lines of
    versions that the checkpoint includes. A damaged line ends the search: truncating removes it.
    """
    with suppress(ConfigError):
        for line in located_lines(path):
            if line.start == position:
                if _step(line) > last_step:
                    break
                position = line.end
    return position


def _lines_before(path: Path, end: int | None) -> Iterator[JsonLine]:
    """The lines up to a byte; what follows is not read, since it may be damaged."""
    if end == 0:
        return
    for line in located_lines(path):
        yield line
        if end is not None and line.end >= end:
            return


def _step(line: JsonLine) -> int:
    step = line.content.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MOST_STEPS:
        raise _wrong(line, f"'step' is {shown(step)}, expected a whole number from 0 to {MOST_STEPS}")
    return step


def _grid(line: JsonLine) -> str | None:
    grid, folder = line.content.get("grid"), line.path.parent
    if grid is None:
        return None
    if not isinstance(grid, str) or not _can_be_a_path(folder, grid):
        raise _wrong(line, f"'grid' is {shown(grid)}, expected the path of an image")
    # The report embeds the grid: a path out of the folder would publish another file.
    if not (folder / grid).resolve().is_relative_to(folder.resolve()):
        raise _wrong(line, f"the grid {shown(grid)} is outside the run's folder")
    return grid


def _can_be_a_path(folder: Path, name: str) -> bool:
    try:
        (folder / name).lstat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # too long, or with characters that no path has
        return False
    return True


def _finite_values(line: JsonLine, other_keys: set[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, value in line.content.items():
        if name in other_keys or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(line, f"{shown(name)} is {shown(value)}, expected a number")
        if not isinstance(value, float) or math.isfinite(value):
            if abs(value) > LARGEST_METRIC:
                raise _wrong(line, f"{shown(name)} is above {LARGEST_METRIC:g} or below -{LARGEST_METRIC:g}")
            values[name] = value
    return values


def _wrong(line: JsonLine, problem: str) -> ConfigError:
    return line.error(f"{problem}; correct the line, or remove it")
