"""`digenrl report`: writes a run's report and summarizes the run in a table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from digenrl.config.reading import ConfigError
from digenrl.console.text_symbols import duration, number
from digenrl.report.headline import (
    Change,
    ends_averaged,
    held_out_changes,
    prediction_accuracy,
    reward_change,
    reward_names,
    samples_per_second,
    share_of_samples,
)
from digenrl.report.page import write_report
from digenrl.run_folder.folder import Status, make_folder
from digenrl.run_folder.reading import RunRecord, read_run
from digenrl.telemetry.lane_shares import TimeWindow, lane_shares, steady_window, without_helper_rows
from digenrl.telemetry.lane_totals import lane_totals
from digenrl.telemetry.styles import percent


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds per step: medians over the steps with a prediction, or over all but the first if there is none.

    `median_error` is the median over steps of the error relative to the measured time.
    """

    measured: float
    predicted: float | None
    median_error: float | None


@dataclass(frozen=True, slots=True)
class LaneSamples:
    """The samples that a lane generated and trained."""

    generated: int
    trained: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The figures of a run; unknown ones are None or empty. If `steady`, busy shares exclude the first step.

    `rewards` says what the reward of training and of evaluations is, if they differ. `lanes` has the samples of
    the whole run, of all lanes that generated or trained some.
    """

    name: str
    status: Status
    steps_done: int
    steps_planned: int
    reward: Change | None
    reward_averaged_over: int
    rewards: Mapping[str, str]
    held_out: Mapping[str, Change]
    samples_per_s: float | None
    stale_share: float | None
    helped_share: float | None
    assisted_share: float | None
    busy: Mapping[str, float]
    lanes: Mapping[str, LaneSamples]
    steady: bool
    step_s: StepTime | None


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """The files that were written, and the run's figures."""

    page: Path
    trace: Path
    summary: RunSummary

    def as_dict(self) -> dict[str, Any]:
        """The content as plain JSON values."""
        return {"report": str(self.page), "trace": str(self.trace), **asdict(self.summary)}


def report_run(path: Path, out: Path | None = None) -> WrittenReport:
    """Writes the report and the trace of a run, whatever its status, into `out`, by default the run's folder."""
    run = read_run(path)
    if out is None and not os.access(path, os.W_OK):
        raise ConfigError(f"{path}: cannot be written; name another folder for the report with --out")
    if out is not None:
        make_folder(out)
    page = write_report(run, out)
    return WrittenReport(page, page.with_name(run.folder.trace.name), summarize(run))


def summarize(run: RunRecord) -> RunSummary:
    steady = steady_window(run.trace)
    shares = lane_shares(run.trace, steady or TimeWindow(0, run.trace.end_ns))
    lanes = without_helper_rows(run.trace.lanes) if run.trace.spans else []
    return RunSummary(
        name=run.info.name,
        status=run.info.status,
        steps_done=run.steps[-1].step + 1 if run.steps else 0,
        steps_planned=run.recipe.steps,
        reward=reward_change(run.steps),
        reward_averaged_over=ends_averaged(len(run.steps)),
        rewards=reward_names(run.recipe),
        held_out=_held_out(run),
        samples_per_s=samples_per_second(run.steps),
        stale_share=share_of_samples(run.steps, "stale_share"),
        helped_share=share_of_samples(run.steps, "helped_share"),
        assisted_share=share_of_samples(run.steps, "assisted_share"),
        busy={lane.name: shares[lane.name].busy for lane in lanes if lane.name in shares},
        lanes={
            each.name: LaneSamples(each.generated, each.trained)
            for each in lane_totals(run.trace, TimeWindow(0, run.trace.end_ns))
            if each.generated or each.trained
        },
        steady=steady is not None,
        step_s=_step_time(run),
    )


def summary_table(summary: RunSummary) -> Table:
    """The summary, one row per figure."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    table.add_row("steps", f"{summary.steps_done} of {summary.steps_planned}", summary.status.value)
    if summary.reward is not None:
        over = summary.reward_averaged_over
        means = f"first and last {over} steps" if over > 1 else "first and last step"
        table.add_row("reward", _arrow(summary.reward), _joined(summary.rewards["training"], means))
    for name, values in summary.held_out.items():
        rewards = summary.rewards["held_out"] if name == "reward_mean" else ""
        table.add_row("held out", _arrow(values), _joined(rewards, name))
    if summary.samples_per_s is not None:
        shares = (
            ("generated by the trainer", summary.helped_share),
            ("trained by generators", summary.assisted_share),
            ("stale", summary.stale_share),
        )
        notes = [f"{percent(share)} {label}" for label, share in shares if share]
        table.add_row("samples/s", f"{summary.samples_per_s:.4g}", ", ".join(notes))
    if summary.step_s is not None:
        table.add_row("step", _step_seconds(summary.step_s.measured), _prediction_note(summary.step_s))
    for lane, share in summary.busy.items():
        table.add_row("busy", percent(share), _joined(lane, _samples_note(summary.lanes.get(lane))))
    return table


def _held_out(run: RunRecord) -> dict[str, Change]:
    changes = held_out_changes(run)
    if changes or not run.evaluations:
        return changes
    first = run.evaluations[-1].values.get("reward_mean")
    return {} if first is None else {"reward_mean": Change(first, None)}


def _step_time(run: RunRecord) -> StepTime | None:
    accuracy = prediction_accuracy(run.steps)
    if accuracy is not None:
        return StepTime(median(accuracy.measured_s), median(accuracy.predicted_s), accuracy.median_error)
    measured = [step.values["step_s"] for step in run.steps if "step_s" in step.values]
    return StepTime(median(measured[1:] or measured), None, None) if measured else None


def _samples_note(samples: LaneSamples | None) -> str:
    if samples is None:
        return ""
    parts = (("generated", samples.generated), ("trained", samples.trained))
    return ", ".join(f"{verb} {count}" for verb, count in parts if count)


def _prediction_note(step_s: StepTime) -> str:
    if step_s.predicted is None or step_s.median_error is None:
        return "not predicted"
    return f"predicted {_step_seconds(step_s.predicted)}, off by {percent(step_s.median_error)}"


def _step_seconds(seconds: float) -> str:
    """Short steps with more digits than `duration` gives them."""
    return f"{seconds:.3g} s" if seconds < 10 else duration(seconds)


def _joined(*notes: str) -> str:
    return ", ".join(note for note in notes if note)


def _arrow(values: Change) -> str:
    return f"{number(values.first)} -> {'?' if values.last is None else number(values.last)}"
