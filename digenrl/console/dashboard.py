"""What the live view shows, as text: how far, how good, how fast, and a row per lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.style import Style
from rich.text import Text

from digenrl.console.lane_activity import Activity
from digenrl.console.progress import Progress
from digenrl.console.text_symbols import bar, duration, number, sparkline
from digenrl.metrics.step_metrics import Evaluation
from digenrl.telemetry.row_folding import FoldedRow, fold_lanes
from digenrl.telemetry.styles import fresh_style, percent
from digenrl.telemetry.trace import Work

NS_PER_SECOND = 1_000_000_000
_FAINT, _STRONG = Style(dim=True), Style(bold=True)
_BUSY_WIDTH = 12
_DOING_WIDTH = 44
_LABEL_WIDTH = 10
_ROWS_ABOVE_LANES = 8
_FEWEST_ROWS, _MOST_ROWS, _KEPT_OF_EACH_KIND = 4, 24, 3
_MOST_PARTS = 3
_MAIN_WORK = {"generator": Work.GENERATE, "reward": Work.SCORE, "trainer": Work.TRAIN}
# The work's colour in traces; a commit's is nearly black, which a dark terminal would swallow.
_STYLES = {work: Style(color=fresh_style(work).fill) for work in Work} | {Work.COMMIT: _STRONG}


@dataclass(frozen=True, slots=True)
class Moment:
    """Everything that one picture shows."""

    name: str
    folder: Path
    progress: Progress
    lane_activity: Sequence[Activity]
    told: Mapping[str, tuple[Work, str]]  # lanes at something that the scheduler does not know, as an evaluation
    now_ns: int
    since_last_step_s: float
    message: str


@dataclass(frozen=True, slots=True)
class Canvas:
    """How much room there is; `plain` terminals know only ASCII."""

    width: int
    height: int
    plain: bool = False


def picture(moment: Moment, canvas: Canvas) -> Text:
    """At most `canvas.height` rows, or the few that it always needs; no row is wider than the canvas."""
    text = Text(no_wrap=True, overflow="crop", end="")
    text.append(moment.name, _STRONG)
    text.append(f"  {moment.folder}\n", _FAINT)
    _append_steps(text, moment, canvas)
    _append_reward(text, moment.progress, canvas)
    _append_held_out(text, moment.progress)
    _append_pace(text, moment.progress)
    if moment.lane_activity:
        text.append("\n")
        _append_lanes(text, moment, canvas)
    if moment.message:
        text.append(f"{moment.message}\n", _FAINT)
    return text


def _append_steps(text: Text, moment: Moment, canvas: Canvas) -> None:
    progress = moment.progress
    share = progress.steps_done / progress.steps
    left_s = progress.left_s(moment.since_last_step_s)
    _append_label(text, "steps")
    text.append(f"{progress.steps_done} of {progress.steps}  ", _STRONG)
    width = max(10, min(40, canvas.width - 60))
    text.append("[", _FAINT)
    text.append(bar(share, width, canvas.plain), _STYLES[Work.TRAIN])
    text.append("]", _FAINT)
    text.append(f" {percent(share)}")
    text.append(f"   {duration(moment.now_ns / NS_PER_SECOND)}", _FAINT)
    if left_s is not None and progress.steps_done < progress.steps:
        text.append(f", {duration(left_s)} left", _FAINT)
    text.append("\n")


def _append_reward(text: Text, progress: Progress, canvas: Canvas) -> None:
    _append_label(text, "reward")
    if not progress.rewards:
        text.append("after the first step\n", _FAINT)
        return
    text.append(number(progress.rewards[-1]), _STRONG)
    if progress.best_reward is not None:
        best, step = progress.best_reward
        text.append(f"   best {number(best)} in step {step}", _FAINT)
    text.append(f"   {sparkline(progress.rewards, canvas.plain)}\n", _STYLES[Work.TRAIN])


def _append_held_out(text: Text, progress: Progress) -> None:
    first, last, best = progress.first_evaluation, progress.last_evaluation, progress.best_evaluation
    if first is None or last is None or best is None:
        return
    _append_label(text, "held-out")
    text.append(_held_out_words(last), _STRONG)
    text.append(f"   after {last.steps_done} steps", _FAINT)
    if last is not first:
        text.append(f"   first {_held_out_words(first)}   best {_held_out_words(best)}", _FAINT)
    for name, value in list(_parts(last).items())[:_MOST_PARTS]:
        text.append(f"   {name} {number(value)}", _FAINT)
    text.append("\n")


def _held_out_words(evaluation: Evaluation) -> str:
    reward = evaluation.numbers.get("reward_mean")
    return "unknown" if reward is None else number(reward)


def _parts(evaluation: Evaluation) -> dict[str, float]:
    """The rewards' parts by their short names."""
    named = evaluation.numbers.items()
    return {name.removeprefix("reward/"): value for name, value in named if name.startswith("reward/")}


def _append_pace(text: Text, progress: Progress) -> None:
    newest = progress.newest
    if "step_s" not in newest:
        return
    _append_label(text, "pace")
    text.append(f"{duration(newest['step_s'])} per step", _STRONG)
    if "predicted_step_s" in newest:
        text.append(f" (predicted {duration(newest['predicted_step_s'])})", _FAINT)
    if "samples_per_s" in newest:
        text.append(f"   {newest['samples_per_s']:.4g} samples/s")
    for name, words in (("stale_share", "stale"), ("helped_share", "made by the trainer")):
        if newest.get(name):
            text.append(f"   {percent(newest[name])} {words}", _FAINT)
    text.append("\n")


def _append_label(text: Text, label: str) -> None:
    text.append(f"{label:<{_LABEL_WIDTH}}", _FAINT)


def _append_lanes(text: Text, moment: Moment, canvas: Canvas) -> None:
    by_name = {doing.lane.name: _as_told(doing, moment.told) for doing in moment.lane_activity}
    lanes = tuple(doing.lane for doing in moment.lane_activity)
    rows_left = min(_MOST_ROWS, max(_FEWEST_ROWS, canvas.height - _ROWS_ABOVE_LANES))
    name_width = max(_LABEL_WIDTH, min(24, max(len(name) for name in by_name) + 2))
    for row in fold_lanes(lanes, rows_left, _KEPT_OF_EACH_KIND):
        if isinstance(row, FoldedRow):
            text.append(f"{'...':<{name_width}}", _FAINT)
            _append_folded(text, row, by_name, moment.progress, canvas)
        else:
            text.append(f"{row.lane.name:<{name_width}}")
            _append_doing(text, by_name[row.lane.name], moment.now_ns)
            share = moment.progress.busy_share(row.lane.name)
            _append_busy(text, share, row.lane.pool, canvas)


def _as_told(doing: Activity, told: Mapping[str, tuple[Work, str]]) -> Activity:
    if doing.lane.name not in told:
        return doing
    work, words = told[doing.lane.name]
    return Activity(doing.lane, work, words)


def _append_doing(text: Text, doing: Activity, now_ns: int) -> None:
    if doing.work is None:
        text.append(f"{doing.words:<{_DOING_WIDTH}}", _FAINT)
        return
    taken_s = 0.0 if doing.since_ns is None else (now_ns - doing.since_ns) / NS_PER_SECOND
    text.append(f"{doing.work.value:<9}", _STYLES[doing.work])
    text.append(f"{doing.words:<23}")
    text.append(f"{duration(taken_s) if taken_s >= 1 else '':<{_DOING_WIDTH - 32}}", _FAINT)


def _append_busy(text: Text, share: float | None, pool: str, canvas: Canvas) -> None:
    if share is not None:
        text.append(bar(share, _BUSY_WIDTH, canvas.plain), _STYLES[_MAIN_WORK[pool]])
        text.append(f"{percent(share):>6}")
    text.append("\n")


def _append_folded(
    text: Text, row: FoldedRow, by_name: Mapping[str, Activity], progress: Progress, canvas: Canvas
) -> None:
    working = sum(by_name[lane.name].work is not None for lane in row.lanes)
    shares = [share for lane in row.lanes if (share := progress.busy_share(lane.name)) is not None]
    text.append(f"{f'{len(row.lanes)} more like these, {working} at work':<{_DOING_WIDTH}}", _FAINT)
    _append_busy(text, sum(shares) / len(shares) if shares else None, row.lanes[0].pool, canvas)
