"""Evaluation on held-out prompts: when it is due, and where its numbers and pictures go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from digenrl.prompts.sources import read_prompts
from digenrl.records import Action, Committed, Event
from digenrl.runs.folder import RunFolder
from digenrl.runs.grids import write_grid
from digenrl.runs.metrics import Evaluation as EvaluationNumbers
from digenrl.runtimes.evaluation import Busy, Evaluation, Evaluator
from digenrl.runtimes.prompt_desk import as_encoded
from digenrl.runtimes.runtime import WorkRuntime
from digenrl.scheduling import SchedulerState
from digenrl.telemetry.trace import Span, Work

NS_PER_SECOND = 1_000_000_000
KIND = "held-out-prompt"  # its rows in the exchange are not those of training prompts


class HeldOut:
    """An observer that has a version evaluated when it is due; a recipe without evaluation never has one."""

    def __init__(
        self,
        folder: RunFolder,
        runtime: WorkRuntime,
        clock: Callable[[], int],
        on_numbers: Callable[[EvaluationNumbers], None],
        on_span: Callable[[Span], None],
    ) -> None:
        self._folder, self._runtime, self._clock = folder, runtime, clock
        self._on_numbers, self._on_span = on_numbers, on_span
        self._settings = folder.recipe.evaluation
        self._evaluator: Evaluator | None = None
        if self._settings is not None:
            prompts = read_prompts(self._settings.prompts)[: self._settings.count]
            self._evaluator = Evaluator(
                runtime,
                [as_encoded(prompt, KIND) for prompt in prompts],
                chunk=self._settings.batch * 4,
                shown=self._settings.shown,
                on_done=self._take,
                on_busy=self._show,
            )

    def prepare(self, first_version: int, *, evaluate: bool) -> None:
        """Has the prompts encoded and, for a run that begins, evaluates what it begins with."""
        if self._evaluator is None:
            return
        self._evaluator.prepare()
        if evaluate:
            self._start(first_version)
            self._evaluator.finish()

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Every so many versions, and the last."""
        if self._settings is None or not isinstance(event, Committed):
            return
        if state.committed % self._settings.every == 0 or state.finished:
            self._start(state.committed)

    def finish(self) -> None:
        """Waits for what is under way."""
        if self._evaluator is not None:
            self._evaluator.finish()

    def _start(self, version: int) -> None:
        assert self._evaluator is not None
        self._evaluator.start(version, self._folder.samples / f".step_{version:06d}")

    def _take(self, evaluation: Evaluation) -> None:
        scores = evaluation.scores
        grid = write_grid(self._folder, evaluation.version, evaluation.pictures, scores)
        numbers = {"reward_mean": fmean(score.reward for score in scores)}
        for name in sorted(scores[0].parts):
            numbers[f"reward/{name}"] = fmean(score.parts[name] for score in scores)
        where = str(grid.relative_to(self._folder.path))
        at_s = self._clock() / NS_PER_SECOND
        self._on_numbers(EvaluationNumbers(evaluation.version, at_s, len(scores), numbers, where))

    def _show(self, busy: Busy) -> None:
        lane = self._runtime.lane_of(busy.worker)
        self._on_span(Span(lane, Work.EVALUATE, busy.began_ns, busy.ended_ns, busy.version, version=busy.version))
