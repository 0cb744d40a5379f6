"""Evaluation on held-out prompts: when it is due, and where its numbers and pictures go."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from statistics import fmean

from digenrl.driver.dispatcher import Dispatcher, raise_failure
from digenrl.driver.evaluation import Busy, Evaluation, Evaluator
from digenrl.driver.prompt_store import as_encoded
from digenrl.prompts.sources import read_prompts
from digenrl.records import Action, Committed, Event
from digenrl.run_folder.folder import RunFolder
from digenrl.run_folder.grids import write_grid
from digenrl.run_folder.lines import read_lines
from digenrl.run_folder.metric_lines import EvaluationRecord
from digenrl.scheduling import SchedulerState
from digenrl.telemetry.trace import Span, Work
from digenrl.worker.orders import OrderFailed

NS_PER_SECOND = 1_000_000_000
PICTURES = ".step_"  # folders of single pictures, until they are put together
KIND = "held-out-prompt"  # its rows in the exchange are not those of training prompts


class HeldOut:
    """An observer that has a version evaluated when it is due; a recipe without evaluation never has one."""

    def __init__(
        self,
        folder: RunFolder,
        runtime: Dispatcher,
        clock: Callable[[], int],
        on_numbers: Callable[[EvaluationRecord], None],
        on_span: Callable[[Span], None],
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._runtime, self._clock = folder, runtime, clock
        self._on_numbers, self._on_span, self._say = on_numbers, on_span, say
        self._preparing = False
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
                on_failed=self._miss,
                on_busy=self._show,
            )

    def prepare(self, version: int) -> None:
        """Has the prompts encoded, and evaluates what the run begins with or, where that is due, goes on with.

        What is wrong with an evaluation shows here, and ends the run before it has cost anything.
        """
        if self._evaluator is None:
            return
        self._preparing = True
        for left_over in self._folder.samples.glob(f"{PICTURES}*"):
            shutil.rmtree(left_over)
        self._evaluator.prepare()
        if self._is_due(version) and version not in self._evaluated():
            self._say("evaluating what there is")
            self._start(version)
            self._evaluator.finish()
        self._preparing = False

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Every so many versions, and the last."""
        if self._evaluator is not None and isinstance(event, Committed) and self._is_due(state.committed):
            self._start(state.committed)

    def finish(self) -> None:
        """Waits for what is under way."""
        if self._evaluator is not None:
            self._evaluator.finish()

    def _is_due(self, version: int) -> bool:
        assert self._settings is not None
        return version % self._settings.every == 0 or version == self._folder.recipe.steps

    def _evaluated(self) -> set[int]:
        """The versions whose numbers are there: those of a run that goes on."""
        return {line["step"] for line in read_lines(self._folder.evaluations)}

    def _start(self, version: int) -> None:
        assert self._evaluator is not None
        self._evaluator.start(version, self._folder.samples / f"{PICTURES}{version:06d}")

    def _take(self, evaluation: Evaluation) -> None:
        scores = evaluation.scores
        grid = write_grid(self._folder, evaluation.version, evaluation.pictures, scores)
        numbers = {"reward_mean": fmean(score.reward for score in scores)}
        for name in sorted(scores[0].parts):
            numbers[f"reward/{name}"] = fmean(score.parts[name] for score in scores)
        where = str(grid.relative_to(self._folder.path))
        at_s = self._clock() / NS_PER_SECOND
        self._on_numbers(EvaluationRecord(evaluation.version, at_s, len(scores), numbers, where))

    def _miss(self, version: int, worker: str, report: OrderFailed) -> None:
        """A run that is well under way goes on without the numbers: a failed reward is never one."""
        if self._preparing:
            raise_failure(worker, report)
        shutil.rmtree(self._folder.samples / f"{PICTURES}{version:06d}", ignore_errors=True)
        self._say(f"the evaluation after {version} steps failed: {report.reason}")

    def _show(self, busy: Busy) -> None:
        lane = self._runtime.lane_of(busy.worker)
        self._on_span(Span(lane, Work.EVALUATE, busy.began_ns, busy.ended_ns, busy.version, version=busy.version))
