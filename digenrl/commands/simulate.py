"""`digenrl simulate`: runs a SPEC through the scheduler on a virtual clock, or predicts a run on one device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import typer
from rich.console import Group, RenderableType

from digenrl.commands.support.output import out, print_written, progress_bar
from digenrl.config.profiles import read_profile
from digenrl.config.reading import ConfigError
from digenrl.config.spec import Spec
from digenrl.simulation.ladder import rungs, simulate_ladder
from digenrl.simulation.simulator import simulate
from digenrl.simulation.single_device import predict_single_device
from digenrl.simulation.tables import (
    answer_table,
    ladder_table,
    prediction_table,
    prediction_title,
    title_of,
    work_table,
)
from digenrl.telemetry.gantt_svg import gantt_svg
from digenrl.telemetry.gantt_terminal import gantt_text
from digenrl.telemetry.perfetto import write_perfetto
from digenrl.telemetry.trace import Trace
from digenrl.telemetry.writing import check_is_no_input, check_new_file, write_atomically


@dataclass(frozen=True, slots=True)
class TraceFiles:
    """Where to write the trace and the Gantt chart of a simulated run; None for neither."""

    perfetto: Path | None
    gantt: Path | None

    def check(self, ladder: bool, inputs: Iterable[Path], force: bool) -> None:
        """Raises ConfigError if a file exists, cannot be written, is an input, or does not go with --ladder."""
        given = [path for path in (self.perfetto, self.gantt) if path is not None]
        for path in given:
            option = "--trace" if path == self.perfetto else "--gantt"
            check_is_no_input(path, inputs, option)
            check_new_file(path, force, option)
        if ladder and given:
            raise ConfigError(
                "--ladder: simulates several runs, without --trace and --gantt; leave one of them out"
            )
        if len({path.resolve() for path in given}) < len(given):
            raise ConfigError(f"--trace and --gantt: both are {self.gantt}; give different files")


def simulate_spec(spec: Spec, search_budget: int, files: TraceFiles, as_json: bool) -> None:
    """Simulates a SPEC and prints the answer."""
    run = simulate(spec, search_budget)
    tables: tuple[RenderableType, ...] = (answer_table(run.spec, run.answer),)
    if run.trace.shares_work:
        tables += ("", work_table(run.trace))
    _show(asdict(run.answer), Group(*tables), run.trace, title_of(run.spec), files, as_json)


def predict_device(profile_name: str, files: TraceFiles, as_json: bool) -> None:
    """Predicts a run on the device of a profile and prints the prediction."""
    profile = read_profile(profile_name)
    predicted = predict_single_device(profile, profile_name)
    title = prediction_title(profile, predicted)
    _show(predicted.as_dict(), prediction_table(profile, predicted), predicted.trace, title, files, as_json)


def compare_techniques(spec: Spec, unpacked: str | None, search_budget: int, as_json: bool) -> None:
    """Simulates a SPEC with the techniques added one by one, and prints the comparison."""
    ladder = rungs(spec, _seconds("--unpacked", unpacked))
    results = []
    with progress_bar("simulating", hidden=as_json) as report:
        for result in simulate_ladder(ladder, search_budget):
            results.append(result)
            report(len(results), len(ladder))
    if as_json:
        rows = [
            {"rung": each.rung.name, "note": each.rung.note, "answer": each.answer and asdict(each.answer)}
            for each in results
        ]
        typer.echo(json.dumps(rows))
    else:
        out.print(ladder_table(results))


def _show(
    content: dict[str, Any], table: RenderableType, trace: Trace, title: str, files: TraceFiles, as_json: bool
) -> None:
    if files.perfetto is not None:
        write_perfetto(trace, files.perfetto)
    if files.gantt is not None:
        write_atomically(files.gantt, gantt_svg(trace, title))
    if as_json:
        typer.echo(json.dumps(content))
        return
    out.print(table)
    out.print()
    out.print(gantt_text(trace, out.width))
    print_written(files.perfetto, files.gantt)


def _seconds(option: str, text: str | None) -> Decimal | None:
    if text is None:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise ConfigError(f"{option}: expected seconds, got '{text}'") from None
    if not value.is_finite() or value <= 0:
        raise ConfigError(f"{option}: must be above 0, got {text}")
    return value
