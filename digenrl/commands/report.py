"""How a run went, in the few numbers that a terminal shows: `digenrl report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from digenrl.console.text_symbols import duration, number
from digenrl.run_folder.folder import RunFolder, Status
from digenrl.telemetry.report.headline import (
    ends_averaged,
    held_out_changes,
    prediction,
    reward_change,
    samples_per_second,
    share_of_samples,
)
from digenrl.telemetry.report.lane_shares import Window, shares_of_lanes, steady_window
from digenrl.telemetry.report.page import write_report
from digenrl.telemetry.report.reading import read_run
from digenrl.telemetry.report.records import RunRecord
from digenrl.telemetry.styles import percent
from digenrl.telemetry.trace import TRAINER_LANE, Trace


@dataclass(frozen=True, slots=True)
class Ends:
    """A number at the beginning and at the end; `last` is None where there is only the first."""

    first: float
    last: float | None


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds per step, medians over the steps that were foretold; over all but the first if none was.

    `median_error` is that of single steps, as a share of the measured time.
    """

    measured: float
    predicted: float | None
    median_error: float | None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What is not known, or not known yet, is None or empty. If `steady`, busy shares leave out the first step."""

    name: str
    status: Status
    steps_done: int
    steps_planned: int
    reward: Ends | None
    reward_averaged_over: int
    held_out: Mapping[str, Ends]
    samples_per_s: float | None
    stale_share: float | None
    helped_share: float | None
    busy: Mapping[str, float]
    steady: bool
    step_s: StepTime | None


@dataclass(frozen=True, slots=True)
class Reported:
    """A report that was written, and what it comes to."""

    page: Path
    trace: Path
    summary: RunSummary

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"report": str(self.page), "trace": str(self.trace), **asdict(self.summary)}


def report_run(path: Path) -> Reported:
    """Writes the report and the trace of a run that is going on, or has ended in whatever way."""
    folder = RunFolder.open(path)
    if folder.standing() is not folder.info.status:
        folder.set_status(folder.standing())  # its process was killed: nobody else would write it down
    page = write_report(path)
    return Reported(page, folder.trace, summary_of(read_run(path), folder.standing()))


def summary_of(run: RunRecord, status: Status) -> RunSummary:
    """The numbers of what is in the folder."""
    reward, steady = reward_change(run.steps), steady_window(run.trace)
    shares = shares_of_lanes(run.trace, steady or Window(0, run.trace.end_ns))
    return RunSummary(
        name=run.name,
        status=status,
        steps_done=run.steps[-1].step + 1 if run.steps else 0,
        steps_planned=run.recipe.steps,
        reward=None if reward is None else Ends(reward.before, reward.after),
        reward_averaged_over=ends_averaged(len(run.steps)),
        held_out=_held_out(run),
        samples_per_s=samples_per_second(run.steps),
        stale_share=share_of_samples(run.steps, "stale_share"),
        helped_share=share_of_samples(run.steps, "helped_share"),
        busy={lane: shares[lane].busy for lane in _own_rows(run.trace) if lane in shares},
        steady=steady is not None,
        step_s=_step_time(run),
    )


def summary_table(summary: RunSummary) -> Table:
    """One line per figure."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    table.add_row("steps", f"{summary.steps_done} of {summary.steps_planned}", summary.status.value)
    if summary.reward is not None:
        over = summary.reward_averaged_over
        means = f"first and last {over} steps" if over > 1 else "first and last step"
        table.add_row("reward", _ends(summary.reward), means)
    for name, ends in summary.held_out.items():
        table.add_row("held out", _ends(ends), name)
    if summary.samples_per_s is not None:
        shares = (("helped by the trainer", summary.helped_share), ("stale", summary.stale_share))
        words = [f"{percent(share)} {what}" for what, share in shares if share]
        table.add_row("samples/s", f"{summary.samples_per_s:.4g}", ", ".join(words))
    if summary.step_s is not None:
        table.add_row("step", _step_seconds(summary.step_s.measured), _prediction_words(summary.step_s))
    for lane, share in summary.busy.items():
        table.add_row("busy", percent(share), lane)
    return table


def _own_rows(trace: Trace) -> list[str]:
    """Lanes that stand for themselves: the trainer's helper rows show its own cards once more."""
    pools = {lane.pool for lane in trace.lanes if lane.name == TRAINER_LANE}
    rows = [lane.name for lane in trace.lanes if lane.name == TRAINER_LANE or lane.pool not in pools]
    return rows if trace.spans else []


def _held_out(run: RunRecord) -> dict[str, Ends]:
    changes = held_out_changes(run)
    if changes or not run.evaluations:
        return {name: Ends(change.before, change.after) for name, change in changes.items()}
    first = run.evaluations[0].values.get("reward_mean")
    return {} if first is None else {"reward_mean": Ends(first, None)}


def _step_time(run: RunRecord) -> StepTime | None:
    foretold = prediction(run.steps)
    if foretold is not None:
        return StepTime(median(foretold.measured_s), median(foretold.predicted_s), foretold.median_error)
    measured = [step.values["step_s"] for step in run.steps if "step_s" in step.values]
    return StepTime(median(measured[1:] or measured), None, None) if measured else None


def _prediction_words(step_s: StepTime) -> str:
    if step_s.predicted is None or step_s.median_error is None:
        return "not predicted"
    return f"predicted {_step_seconds(step_s.predicted)}, off by {percent(step_s.median_error)}"


def _step_seconds(seconds: float) -> str:
    """Short steps with more digits than `duration` gives them."""
    return f"{seconds:.3g} s" if seconds < 10 else duration(seconds)


def _ends(ends: Ends) -> str:
    return f"{number(ends.first)} -> {'?' if ends.last is None else number(ends.last)}"
