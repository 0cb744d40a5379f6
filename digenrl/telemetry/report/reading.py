"""Reads a run's folder. Files that a young run has not written yet count as empty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from digenrl.config.reading import ConfigError, read_mapping, read_model
from digenrl.config.recipe import Recipe
from digenrl.telemetry.report.json_lines import Line, numbers_in, read_json_lines, step_of
from digenrl.telemetry.report.records import Cell, Evaluation, RunRecord, SampleGrid, StepMetrics
from digenrl.telemetry.trace import LaneInfo, Span, Trace, Work

_FORMAT = 1
_SPAN = TypeAdapter(Span)
_GRID_KEY = "grid"


class _Tolerant(BaseModel):
    """A file's part; keys that a later version may add are no mistake."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _LaneEntry(_Tolerant):
    name: str
    pool: str
    device: str = ""
    joined_ns: int = 0
    left_ns: int | None = None


class _RunFile(_Tolerant):
    """`run.json`."""

    format: int
    name: str
    digenrl: str = ""
    started: str = ""
    status: Literal["running", "finished", "interrupted", "failed"]
    lanes: tuple[_LaneEntry, ...]
    opening: dict[str, Any] = {}


class _CellEntry(_Tolerant):
    prompt: str
    reward: float | None = None
    parts: dict[str, float | None] = {}


class _GridFile(_Tolerant):
    """`samples/step_NNNNNN.json`."""

    columns: int = Field(ge=1)
    gap: int = Field(default=0, ge=0)
    items: tuple[_CellEntry, ...]


def read_run(folder: Path) -> RunRecord:
    """Everything the report needs from a run's folder; raises ConfigError if it is none, or is damaged."""
    config, about = folder / "config.yaml", folder / "run.json"
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; name the folder of a run")
    missing = [path.name for path in (config, about) if not path.is_file()]
    if missing:
        raise ConfigError(f"{folder}: not the folder of a run: it has no {' and no '.join(missing)}")
    run_file = _read_run_file(about)
    recipe = read_model(Recipe, config)
    return RunRecord(
        name=run_file.name,
        status=run_file.status,
        started=run_file.started,
        digenrl=run_file.digenrl,
        recipe=recipe,
        recipe_text=config.read_text(encoding="utf-8"),
        devices={lane.name: lane.device for lane in run_file.lanes},
        opening=run_file.opening,
        trace=_read_trace(folder / "spans.jsonl", run_file.lanes, shared_cards=recipe.topology.shares_cards),
        steps=_read_steps(folder / "metrics.jsonl"),
        evaluations=_read_evaluations(folder),
    )


def _read_run_file(path: Path) -> _RunFile:
    content = read_mapping(path)
    if content.get("format") != _FORMAT:
        raise ConfigError(
            f"{path}: format is {content.get('format')!r}; this digenrl reads format {_FORMAT}: "
            "use the version that wrote the run"
        )
    return read_model(_RunFile, path)


def _read_trace(path: Path, lanes: tuple[_LaneEntry, ...], shared_cards: bool) -> Trace:
    """The run ends with its last work; a publication may outlive it."""
    rows = tuple(LaneInfo(lane.name, lane.pool, lane.joined_ns, lane.left_ns) for lane in lanes)
    names = frozenset(row.name for row in rows)
    spans = sorted((_span(line, names) for line in read_json_lines(path)), key=lambda span: span.start_ns)
    end_ns = max((span.end_ns for span in spans if span.work is not Work.PUBLISH), default=0)
    return Trace(rows, tuple(spans), end_ns, shared_cards)


def _span(line: Line, lanes: frozenset[str]) -> Span:
    try:
        span = _SPAN.validate_python(line.content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise line.complaint(f"no span of work: {where}: {first['msg']}") from None
    if span.lane not in lanes:
        raise line.complaint(f"unknown lane {span.lane!r}; run.json has: {', '.join(sorted(lanes))}")
    if span.end_ns < span.start_ns:
        raise line.complaint(f"the span ends at {span.end_ns} ns, before it starts at {span.start_ns} ns")
    return span


def _read_steps(path: Path) -> tuple[StepMetrics, ...]:
    leave_out = frozenset({"step"})
    return _latest_of_each_step(
        StepMetrics(step_of(line), numbers_in(line, leave_out)) for line in read_json_lines(path)
    )


def _latest_of_each_step(metrics: Iterable[StepMetrics]) -> tuple[StepMetrics, ...]:
    """A resumed run does again what its last checkpoint did not hold: the later line is the one that counts."""
    by_step = {one.step: one for one in metrics}
    return tuple(by_step[step] for step in sorted(by_step))


def _read_evaluations(folder: Path) -> tuple[Evaluation, ...]:
    by_step: dict[int, Evaluation] = {}
    leave_out = frozenset({"step", _GRID_KEY})
    for line in read_json_lines(folder / "evaluations.jsonl"):
        step = step_of(line)
        by_step[step] = Evaluation(step, numbers_in(line, leave_out), _grid_of(folder, line))
    return tuple(by_step[step] for step in sorted(by_step))


def _grid_of(folder: Path, line: Line) -> SampleGrid | None:
    name = line.content.get(_GRID_KEY)
    if name is None:
        return None
    image = folder / str(name)
    # The page carries what it shows: a path out of the run would carry somebody else's file.
    if not image.resolve().is_relative_to(folder.resolve()):
        raise line.complaint(f"the grid {name!r} lies outside of the run's folder")
    if not image.is_file():
        return None
    about = image.with_suffix(".json")
    if not about.is_file():
        return SampleGrid(image, columns=1, gap=0, cells=())
    grid = read_model(_GridFile, about)
    cells = tuple(Cell(item.prompt, item.reward, _without_nulls(item.parts)) for item in grid.items)
    return SampleGrid(image, grid.columns, grid.gap, cells)


def _without_nulls(parts: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in parts.items() if value is not None}
