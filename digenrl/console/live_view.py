"""What a live run shows while it goes on: a picture on a terminal, a line per step elsewhere, or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from rich.console import Console
from rich.live import Live

from digenrl.console.dashboard import Canvas, Moment, picture
from digenrl.console.lane_activity import lane_activity
from digenrl.console.progress import Progress
from digenrl.console.text_symbols import duration, number
from digenrl.loop import Observer
from digenrl.metrics.sinks import evaluation_line, json_numbers
from digenrl.metrics.step_metrics import Evaluation, MetricSink
from digenrl.records import Action, Committed, Event
from digenrl.scheduling import SchedulerState
from digenrl.telemetry.styles import percent
from digenrl.telemetry.trace import Work

_SHORTEST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 1.0  # durations grow even when nothing else changes
_CPU_SHARE = 0.005  # of one core: a dear picture is drawn less often


class View(Observer, MetricSink, Protocol):
    """Watches the loop and takes the numbers in; used as a context, so that it leaves a clean terminal behind."""

    def recall(self, steps: Iterable[Mapping[str, float | None]], evaluations: Iterable[Evaluation]) -> None:
        """Takes in what a run that goes on has behind it, without showing it again."""

    def notify(self, message: str) -> None:
        """What is going on besides, as "loading the model"; nothing to say is ""."""

    def tell(self, lane: str, work: Work | None, words: str = "") -> None:
        """What a lane is at that the scheduler does not know, as EVALUATE "40 of 200"; None when that is over."""

    def tick(self) -> None:
        """Called several times a second while the loop waits; cheap when there is nothing new."""

    def __enter__(self) -> Self:
        """From here on it may draw."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The last picture stays, the cursor is back."""


@dataclass(frozen=True, slots=True)
class RunTitle:
    """What a view says about the run as a whole."""

    name: str
    folder: Path
    steps: int


@dataclass(frozen=True, slots=True)
class Clocks:
    """`now` and `processor`, in seconds: `time.monotonic` and `time.thread_time`, or a test's own."""

    now: Callable[[], float]
    processor: Callable[[], float]


def choose_view(title: RunTitle, console: Console, clocks: Clocks, as_json: bool = False) -> View:
    """JSON if asked for, a picture on a terminal, else lines."""
    if as_json:
        return JsonView(console.file)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalView(title, console, clocks)
    return PlainView(title, console)


class _QuietView:
    """A view that has nothing to do but when a step or an evaluation is over."""

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Decisions are not shown."""

    def recall(self, steps: Iterable[Mapping[str, float | None]], evaluations: Iterable[Evaluation]) -> None:
        """The past is not shown."""

    def notify(self, message: str) -> None:
        """Not shown."""

    def tell(self, lane: str, work: Work | None, words: str = "") -> None:
        """Not shown."""

    def tick(self) -> None:
        """Nothing waits to be shown."""

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to clean up."""


class JsonView(_QuietView):
    """A JSON object per step, as in metrics.jsonl, and `{"evaluation": {...}}` per evaluation."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def step(self, numbers: Mapping[str, float]) -> None:
        """One line."""
        self._print(json_numbers(numbers))

    def evaluation(self, evaluation: Evaluation) -> None:
        """One line."""
        self._print({"evaluation": evaluation_line(evaluation)})

    def _print(self, content: Mapping[str, object]) -> None:
        self._out.write(json.dumps(content, allow_nan=False) + "\n")
        self._out.flush()


class PlainView(_QuietView):
    """A line per step and per evaluation, for logs."""

    def __init__(self, title: RunTitle, console: Console) -> None:
        self._progress = Progress(title.steps)
        self._console = console

    def recall(self, steps: Iterable[Mapping[str, float | None]], evaluations: Iterable[Evaluation]) -> None:
        """The pace so far, for the time that is left."""
        for numbers in steps:
            self._progress.step(numbers)

    def notify(self, message: str) -> None:
        """One line."""
        if message:
            self._print(message)

    def step(self, numbers: Mapping[str, float]) -> None:
        """One line."""
        self._progress.step(numbers)
        self._print(step_words(self._progress))

    def evaluation(self, evaluation: Evaluation) -> None:
        """One line."""
        words = [f"{name} {number(value)}" for name, value in evaluation.numbers.items()]
        self._print(f"evaluation after {evaluation.steps_done} steps: {', '.join(words)}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def step_words(progress: Progress) -> str:
    """The newest step in one line."""
    newest = progress.newest
    words = [f"step {progress.steps_done}/{progress.steps}"]
    if "reward_mean" in newest:
        words.append(f"reward {number(newest['reward_mean'])}")
    if "step_s" in newest:
        words.append(f"{duration(newest['step_s'])} per step")
    if "samples_per_s" in newest:
        words.append(f"{newest['samples_per_s']:.4g} samples/s")
    for name, what in (("stale_share", "stale"), ("helped_share", "helped")):
        if newest.get(name):
            words.append(f"{what} {percent(newest[name])}")
    left_s = progress.left_s(0.0)
    if left_s:
        words.append(f"{duration(left_s)} left")
    return ", ".join(words)


class TerminalView:
    """A picture that is drawn over itself, at most four times a second and for half a percent of a core."""

    def __init__(self, title: RunTitle, console: Console, clocks: Clocks) -> None:
        self._title, self._console, self._clocks = title, console, clocks
        self._progress = Progress(title.steps)
        self._state: SchedulerState | None = None
        self._told: dict[str, tuple[Work, str]] = {}
        self._message = ""
        self._seen_ns, self._seen_s = 0, clocks.now()
        self._step_ended_s = clocks.now()
        self._changed = True
        self._drawn_s = self._next_s = -1.0
        # Its own thread would draw pictures that are half old and half new.
        self._live = Live(console=console, auto_refresh=False)

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Remembers the newest state; drawing is for `tick`."""
        self._state = state
        self._seen_ns, self._seen_s = event.at_ns, self._clocks.now()
        if isinstance(event, Committed):
            self._step_ended_s = self._seen_s
        self._changed = True
        self.tick()

    def step(self, numbers: Mapping[str, float]) -> None:
        """Shown with the next picture."""
        self._progress.step(numbers)
        self._changed = True

    def evaluation(self, evaluation: Evaluation) -> None:
        """Shown with the next picture."""
        self._progress.evaluation(evaluation)
        self._changed = True

    def recall(self, steps: Iterable[Mapping[str, float | None]], evaluations: Iterable[Evaluation]) -> None:
        """The curve and the best so far go on."""
        for numbers in steps:
            self._progress.step(numbers)
        for evaluation in evaluations:
            self._progress.evaluation(evaluation)

    def notify(self, message: str) -> None:
        """In the last row, at once."""
        self._message = message
        self._draw()

    def tell(self, lane: str, work: Work | None, words: str = "") -> None:
        """In the lane's row."""
        if work is None:
            self._told.pop(lane, None)
        else:
            self._told[lane] = (work, words)
        self._changed = True
        self.tick()

    def tick(self) -> None:
        """Draws if there is something new and the last picture is old enough."""
        now_s = self._clocks.now()
        if now_s >= self._next_s and (self._changed or now_s >= self._drawn_s + _LONGEST_PAUSE_S):
            self._draw()

    def close(self) -> None:
        """The context's end closes it."""

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
        begun = self._clocks.processor()
        console = self._console
        canvas = Canvas(console.width, console.height, plain=console.options.ascii_only)
        self._live.update(picture(self._moment(), canvas), refresh=True)
        taken_s = self._clocks.processor() - begun
        self._changed, self._drawn_s = False, self._clocks.now()
        self._next_s = self._drawn_s + max(_SHORTEST_PAUSE_S, taken_s / _CPU_SHARE)

    def _moment(self) -> Moment:
        now_s = self._clocks.now()
        return Moment(
            name=self._title.name,
            folder=self._title.folder,
            progress=self._progress,
            lane_activity=() if self._state is None else lane_activity(self._state),
            told=self._told,
            now_ns=self._seen_ns + round((now_s - self._seen_s) * 1e9),
            since_last_step_s=now_s - self._step_ended_s,
            message=self._message,
        )
