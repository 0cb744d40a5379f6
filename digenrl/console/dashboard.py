"""The dashboard of a live run as text: progress, rewards, speed, and a row per lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.style import Style
from rich.text import Text

from digenrl.console.lane_activity import Activity
from digenrl.console.progress import Progress
from digenrl.console.text_symbols import bar, duration, number, sparkline
from digenrl.run_folder.metric_lines import EvaluationRecord
from digenrl.telemetry.row_folding import FoldedRow, fold_lanes
from digenrl.telemetry.styles import fresh_style, percent
from digenrl.telemetry.trace import Work

NS_PER_SECOND = 1_000_000_000
_FAINT, _STRONG = Style(dim=True), Style(bold=True)
_BUSY_WIDTH = 12
_ACTIVITY_WIDTH = 44
_LABEL_WIDTH = 10
_ROWS_ABOVE_LANES = 8
_FEWEST_ROWS, _MOST_ROWS, _KEPT_OF_EACH_KIND = 4, 24, 3
_MOST_PARTS = 3
_MAIN_WORK = {"generator": Work.GENERATE, "reward": Work.SCORE, "trainer": Work.TRAIN}
# The colours of traces; that of a commit is nearly black, and would be invisible on a dark terminal.
_STYLES = {work: Style(color=fresh_style(work).fill) for work in Work} | {Work.COMMIT: _STRONG}


@dataclass(frozen=True, slots=True)
class DashboardState:
    """Everything that the dashboard shows."""

    name: str
    folder: Path
    progress: Progress
    lane_activity: Sequence[Activity]
    now_ns: int
    since_last_step_s: float
    message: str


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """Width and height in characters; `ascii_only` terminals show no other characters."""

    width: int
    height: int
    ascii_only: bool = False


def render_dashboard(state: DashboardState, size: TerminalSize) -> Text:
    """The dashboard. It fits the terminal's width, and its height unless that is very low."""
    text = Text(no_wrap=True, overflow="crop", end="")
    text.append(state.name, _STRONG)
    text.append(f"  {state.folder}\n", _FAINT)
    _append_steps(text, state, size)
    _append_reward(text, state.progress, size)
    _append_held_out(text, state.progress)
    _append_speed(text, state.progress)
    if state.lane_activity:
        text.append("\n")
        _append_lanes(text, state, size)
    if state.message:
        text.append(f"{state.message}\n", _FAINT)
    return text


def _append_steps(text: Text, state: DashboardState, size: TerminalSize) -> None:
    progress = state.progress
    share = progress.steps_done / progress.steps
    left_s = progress.left_s(state.since_last_step_s)
    _append_label(text, "steps")
    text.append(f"{progress.steps_done} of {progress.steps}  ", _STRONG)
    width = max(10, min(40, size.width - 60))
    text.append("[", _FAINT)
    text.append(bar(share, width, size.ascii_only), _STYLES[Work.TRAIN])
    text.append("]", _FAINT)
    text.append(f" {percent(share)}")
    text.append(f"   {duration(state.now_ns / NS_PER_SECOND)}", _FAINT)
    if left_s is not None and progress.steps_done < progress.steps:
        text.append(f", {duration(left_s)} left", _FAINT)
    text.append("\n")


def _append_reward(text: Text, progress: Progress, size: TerminalSize) -> None:
    _append_label(text, "reward")
    if not progress.rewards:
        text.append("after the first step\n", _FAINT)
        return
    text.append(number(progress.rewards[-1]), _STRONG)
    if progress.best_reward is not None:
        best, step = progress.best_reward
        text.append(f"   best {number(best)} in step {step}", _FAINT)
    text.append(f"   {sparkline(progress.rewards, size.ascii_only)}\n", _STYLES[Work.TRAIN])


def _append_held_out(text: Text, progress: Progress) -> None:
    first, last, best = progress.first_evaluation, progress.last_evaluation, progress.best_evaluation
    if first is None or last is None or best is None:
        return
    _append_label(text, "held-out")
    text.append(_held_out_reward(last), _STRONG)
    text.append(f"   after {last.steps_done} steps", _FAINT)
    if last is not first:
        text.append(f"   first {_held_out_reward(first)}   best {_held_out_reward(best)}", _FAINT)
    for name, value in list(_parts(last).items())[:_MOST_PARTS]:
        text.append(f"   {name} {number(value)}", _FAINT)
    text.append("\n")


def _held_out_reward(evaluation: EvaluationRecord) -> str:
    reward = evaluation.values.get("reward_mean")
    return "unknown" if reward is None else number(reward)


def _parts(evaluation: EvaluationRecord) -> dict[str, float]:
    """The parts of the reward, without their common prefix."""
    values = evaluation.values.items()
    return {name.removeprefix("reward/"): value for name, value in values if name.startswith("reward/")}


def _append_speed(text: Text, progress: Progress) -> None:
    newest = progress.newest
    if "step_s" not in newest:
        return
    _append_label(text, "speed")
    text.append(f"{duration(newest['step_s'])} per step", _STRONG)
    if "predicted_step_s" in newest:
        text.append(f" (predicted {duration(newest['predicted_step_s'])})", _FAINT)
    if "samples_per_s" in newest:
        text.append(f"   {newest['samples_per_s']:.4g} samples/s")
    for name, label in (("stale_share", "stale"), ("helped_share", "generated by the trainer")):
        if newest.get(name):
            text.append(f"   {percent(newest[name])} {label}", _FAINT)
    text.append("\n")


def _append_label(text: Text, label: str) -> None:
    text.append(f"{label:<{_LABEL_WIDTH}}", _FAINT)


def _append_lanes(text: Text, state: DashboardState, size: TerminalSize) -> None:
    by_name = {activity.lane.name: activity for activity in state.lane_activity}
    lanes = tuple(activity.lane for activity in state.lane_activity)
    rows_left = min(_MOST_ROWS, max(_FEWEST_ROWS, size.height - _ROWS_ABOVE_LANES))
    name_width = max(_LABEL_WIDTH, min(24, max(len(name) for name in by_name) + 2))
    for row in fold_lanes(lanes, rows_left, _KEPT_OF_EACH_KIND):
        if isinstance(row, FoldedRow):
            text.append(f"{'...':<{name_width}}", _FAINT)
            _append_folded(text, row, by_name, state.progress, size)
        else:
            text.append(f"{row.lane.name:<{name_width}}")
            _append_activity(text, by_name[row.lane.name], state.now_ns)
            share = state.progress.busy_share(row.lane.name)
            _append_busy(text, share, row.lane.pool, size)


def _append_activity(text: Text, activity: Activity, now_ns: int) -> None:
    if activity.work is None:
        text.append(f"{activity.description:<{_ACTIVITY_WIDTH}}", _FAINT)
        return
    elapsed_s = 0.0 if activity.since_ns is None else (now_ns - activity.since_ns) / NS_PER_SECOND
    text.append(f"{activity.work.value:<9}", _STYLES[activity.work])
    text.append(f"{activity.description:<23}")
    text.append(f"{duration(elapsed_s) if elapsed_s >= 1 else '':<{_ACTIVITY_WIDTH - 32}}", _FAINT)


def _append_busy(text: Text, share: float | None, pool: str, size: TerminalSize) -> None:
    if share is not None:
        text.append(bar(share, _BUSY_WIDTH, size.ascii_only), _STYLES[_MAIN_WORK[pool]])
        text.append(f"{percent(share):>6}")
    text.append("\n")


def _append_folded(
    text: Text, row: FoldedRow, by_name: Mapping[str, Activity], progress: Progress, size: TerminalSize
) -> None:
    working = sum(by_name[lane.name].work is not None for lane in row.lanes)
    shares = [share for lane in row.lanes if (share := progress.busy_share(lane.name)) is not None]
    text.append(f"{f'{len(row.lanes)} more like these, {working} working':<{_ACTIVITY_WIDTH}}", _FAINT)
    _append_busy(text, sum(shares) / len(shares) if shares else None, row.lanes[0].pool, size)
