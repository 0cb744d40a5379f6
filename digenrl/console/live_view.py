"""The live view of a run: a dashboard on a terminal, a line per step elsewhere, or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from rich.console import Console
from rich.live import Live

from digenrl.console.dashboard import DashboardState, TerminalSize, render_dashboard
from digenrl.console.lane_activity import lane_activity
from digenrl.console.progress import Progress
from digenrl.console.text_symbols import duration, number, skipped_updates
from digenrl.records import Action, Committed, Event
from digenrl.run_folder.metric_lines import EvaluationRecord, StepRecord, evaluation_line, step_line
from digenrl.scheduling import SchedulerState
from digenrl.telemetry.styles import percent

_SHORTEST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 1.0  # durations grow even when nothing else changes
_CPU_SHARE = 0.005  # of one core: an expensive dashboard is drawn less often


class RunView:
    """Observes the loop and takes metrics, as an Observer and a MetricSink. Ignores all that it does not override.

    It is a context manager, which leaves a clean terminal behind.
    """

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        pass

    def step(self, metrics: Mapping[str, float]) -> None:
        pass

    def evaluation(self, evaluation: EvaluationRecord) -> None:
        pass

    def close(self) -> None:
        pass

    def load_history(self, steps: Iterable[StepRecord], evaluations: Iterable[EvaluationRecord]) -> None:
        """Takes the earlier steps and evaluations of a resumed run, without printing them again."""

    def notify(self, message: str) -> None:
        """Shows a status message such as "loading the model"; "" clears it."""

    def tick(self) -> None:
        """Redraws if needed; called several times a second while the loop waits."""

    def __enter__(self) -> Self:
        """Starts drawing."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the last state on the screen and restores the cursor."""


@dataclass(frozen=True, slots=True)
class RunTitle:
    """The facts that a view shows about the run as a whole."""

    name: str
    folder: Path
    steps: int


@dataclass(frozen=True, slots=True)
class Clocks:
    """Wall time and processor time in seconds: `time.monotonic` and `time.thread_time`, or those of a test."""

    now: Callable[[], float]
    processor: Callable[[], float]


def choose_view(title: RunTitle, console: Console, clocks: Clocks, as_json: bool = False) -> RunView:
    """JSON if asked for, a dashboard on a terminal, otherwise lines."""
    if as_json:
        return JsonView(console.file)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalView(title, console, clocks)
    return PlainView(title, console)


class JsonView(RunView):
    """Prints a JSON object per step, as in metrics.jsonl, and `{"evaluation": {...}}` per evaluation."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def step(self, metrics: Mapping[str, float]) -> None:
        self._print(step_line(metrics))

    def evaluation(self, evaluation: EvaluationRecord) -> None:
        self._print({"evaluation": evaluation_line(evaluation)})

    def _print(self, content: Mapping[str, object]) -> None:
        self._out.write(json.dumps(content, allow_nan=False) + "\n")
        self._out.flush()


class PlainView(RunView):
    """Prints a line per step, evaluation and message, for logs."""

    def __init__(self, title: RunTitle, console: Console) -> None:
        self._progress = Progress(title.steps)
        self._console = console

    def load_history(self, steps: Iterable[StepRecord], evaluations: Iterable[EvaluationRecord]) -> None:
        self._progress.load(steps, evaluations)

    def notify(self, message: str) -> None:
        if message:
            self._print(message)

    def step(self, metrics: Mapping[str, float]) -> None:
        self._progress.step(metrics)
        self._print(step_summary(self._progress))

    def evaluation(self, evaluation: EvaluationRecord) -> None:
        values = [f"{name} {number(value)}" for name, value in evaluation.values.items()]
        steps = "1 step" if evaluation.steps_done == 1 else f"{evaluation.steps_done} steps"
        self._print(f"evaluation after {steps}: {', '.join(values)}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def step_summary(progress: Progress) -> str:
    """The newest step in one line."""
    newest = progress.newest
    parts = [f"step {progress.steps_done}/{progress.steps}"]
    if "reward_mean" in newest:
        parts.append(f"reward {number(newest['reward_mean'])}")
    if "step_s" in newest:
        parts.append(f"{duration(newest['step_s'])} per step")
    if "samples_per_s" in newest:
        parts.append(f"{newest['samples_per_s']:.4g} samples/s")
    for name in ("stale", "helped", "assisted"):
        if newest.get(f"{name}_share"):
            parts.append(f"{name} {percent(newest[f'{name}_share'])}")
    if newest.get("skipped_updates"):
        parts.append(skipped_updates(newest["skipped_updates"]))
    left_s = progress.left_s(0.0)
    if left_s:
        parts.append(f"{duration(left_s)} left")
    return ", ".join(parts)


class TerminalView(RunView):
    """A dashboard redrawn in place, at most four times a second and with at most half a percent of a core."""

    def __init__(self, title: RunTitle, console: Console, clocks: Clocks) -> None:
        self._title, self._console, self._clocks = title, console, clocks
        self._progress = Progress(title.steps)
        self._state: SchedulerState | None = None
        self._message = ""
        self._seen_ns, self._seen_s = 0, clocks.now()
        self._step_ended_s = clocks.now()
        self._changed = True
        self._drawn_s = self._next_s = -1.0
        # A refresh thread would draw dashboards that mix old and new values.
        self._live = Live(console=console, auto_refresh=False)

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        self._state = state
        self._seen_ns, self._seen_s = event.at_ns, self._clocks.now()
        if isinstance(event, Committed):
            self._step_ended_s = self._seen_s
        self._changed = True
        self.tick()

    def step(self, metrics: Mapping[str, float]) -> None:
        self._progress.step(metrics)
        self._changed = True

    def evaluation(self, evaluation: EvaluationRecord) -> None:
        self._progress.evaluation(evaluation)
        self._changed = True

    def load_history(self, steps: Iterable[StepRecord], evaluations: Iterable[EvaluationRecord]) -> None:
        self._progress.load(steps, evaluations)

    def notify(self, message: str) -> None:
        self._message = message
        self._draw()

    def tick(self) -> None:
        now_s = self._clocks.now()
        if now_s >= self._next_s and (self._changed or now_s >= self._drawn_s + _LONGEST_PAUSE_S):
            self._draw()

    def __enter__(self) -> Self:
        self._live.start()
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._draw()
        finally:
            self._live.stop()

    def _draw(self) -> None:
        if not self._live.is_started:
            return
        start_s = self._clocks.processor()
        console = self._console
        size = TerminalSize(console.width, console.height, ascii_only=console.options.ascii_only)
        self._live.update(render_dashboard(self._dashboard_state(), size), refresh=True)
        cost_s = self._clocks.processor() - start_s
        self._changed, self._drawn_s = False, self._clocks.now()
        self._next_s = self._drawn_s + max(_SHORTEST_PAUSE_S, cost_s / _CPU_SHARE)

    def _dashboard_state(self) -> DashboardState:
        now_s = self._clocks.now()
        return DashboardState(
            name=self._title.name,
            folder=self._title.folder,
            progress=self._progress,
            lane_activity=() if self._state is None else lane_activity(self._state),
            now_ns=self._seen_ns + round((now_s - self._seen_s) * 1e9),
            since_last_step_s=now_s - self._step_ended_s,
            message=self._message,
        )
