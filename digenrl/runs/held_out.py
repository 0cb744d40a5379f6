"""Evaluations on held-out prompts: collects the scores of a version's chunks, and writes numbers and pictures."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NoReturn

from digenrl.config.recipes.files import evaluation_fingerprint
from digenrl.config.recipes.recipe import Recipe
from digenrl.driver.dispatcher import raise_failure
from digenrl.records import (
    AbandonEvaluation,
    Action,
    Evaluated,
    Event,
    HeldOutChunk,
    JobFailed,
    PromptRow,
    Scored,
    Scores,
)
from digenrl.run_folder.folder import RunFolder
from digenrl.run_folder.grids import HeldOutScore, write_grid
from digenrl.run_folder.metric_lines import EvaluationRecord, read_evaluations
from digenrl.runs.checkpointer import RunPosition
from digenrl.scheduling import SchedulerState
from digenrl.units import NS_PER_SECOND

PICTURES = ".step_"  # folders of single pictures, until they are combined into a grid


def _is_due(folder: RunFolder, recipe: Recipe, version: int, end: int | None = None) -> bool:
    """Whether a version is due for evaluation and has not been evaluated, by the file up to a byte."""
    evaluated = {each.steps_done for each in read_evaluations(folder.evaluations, end)}
    return recipe.evaluates(version) and version not in evaluated


def unfinished_evaluations(
    folder: RunFolder, recipe: Recipe, position: RunPosition, end: int | None = None
) -> tuple[int, ...]:
    """The versions that a resumed run evaluates first: older ones that it was evaluating, and its own."""
    versions = (*position.evaluations, position.step)
    return tuple(version for version in versions if _is_due(folder, recipe, version, end))


class HeldOut:
    """An observer that writes an evaluation when all its chunks are scored. A recipe may have none.

    `on_failure` gets the version of an evaluation that failed, and a line that says why.
    """

    def __init__(
        self,
        folder: RunFolder,
        prompts: Sequence[PromptRow],
        first_version: int,
        on_evaluation: Callable[[EvaluationRecord], None],
        on_failure: Callable[[int, str], None],
    ) -> None:
        self._folder, self._prompts, self._first_version = folder, prompts, first_version
        self._on_evaluation, self._on_failure = on_evaluation, on_failure
        self._chunks: dict[int, dict[int, Scores]] = {}  # by version, then by chunk
        for left_over in folder.samples.glob(f"{PICTURES}*"):
            shutil.rmtree(left_over)

    def _pictures(self, version: int) -> Path:
        """Where the pictures of a version go until they are combined."""
        return self._folder.samples / f"{PICTURES}{version:06d}"

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Collects pictures and scores. A failed evaluation is reported, or ends a run without results."""
        if isinstance(event, Evaluated):
            self._keep_pictures(event)
            if event.scores is not None:
                self._add(event.job.chunk, event.scores, state, event.at_ns)
        elif isinstance(event, Scored) and isinstance(event.job.piece, HeldOutChunk):
            self._add(event.job.piece, event.scores, state, event.at_ns)
        for action in actions:
            if isinstance(action, AbandonEvaluation):
                if isinstance(event, JobFailed) and self._has_nothing_to_lose(action.version, state):
                    self._end_run(action.version, event)
                self._chunks.pop(action.version, None)
                shutil.rmtree(self._pictures(action.version), ignore_errors=True)
                is_last = action.version == self._folder.recipe.steps  # the version of the last checkpoint
                again = f"; {self._how_to_repeat()}" if is_last else ""
                line = f"{_evaluation_of(action.version)} failed and is left out: {action.reason}{again}"
                self._on_failure(action.version, line)

    def _has_nothing_to_lose(self, version: int, state: SchedulerState) -> bool:
        """Whether a new run is before its first step, or a resumed one only makes up for this evaluation."""
        begins = version == self._first_version == state.committed
        return begins and (version == 0 or state.all_committed)

    def _end_run(self, version: int, failure: JobFailed) -> NoReturn:
        remedy = "correct the recipe or its rewards and start again, or train without evaluations: evaluation=off"
        reason = f"{failure.reason}; {self._how_to_repeat() if version else remedy}"
        where = _evaluation_of(version)
        raise_failure(
            where, replace(failure, reason=f"{where} failed: {reason}" if failure.user_error else reason)
        )

    def _how_to_repeat(self) -> str:
        return f"to evaluate again: digenrl train --resume {self._folder.path}"

    def _keep_pictures(self, event: Evaluated) -> None:
        folder = self._pictures(event.job.chunk.version)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in event.pictures:
            (folder / name).write_bytes(content)

    def _add(self, chunk: HeldOutChunk, scores: Scores, state: SchedulerState, at_ns: int) -> None:
        chunks = self._chunks.setdefault(chunk.version, {})
        chunks[chunk.index] = scores
        if len(chunks) == state.terms.evaluation_chunks:
            self._write(chunk.version, self._chunks.pop(chunk.version), at_ns)

    def _write(self, version: int, chunks: dict[int, Scores], at_ns: int) -> None:
        scores = self._scores(chunks)
        grid = write_grid(self._folder, version, self._pictures(version), scores)
        numbers = {"reward_mean": fmean(score.reward for score in scores)}
        for name in sorted({name for score in scores for name in score.parts}):
            numbers[f"reward/{name}"] = fmean(score.parts[name] for score in scores if name in score.parts)
        where = str(grid.relative_to(self._folder.path))
        settings = evaluation_fingerprint(self._folder.recipe)
        record = EvaluationRecord(version, at_ns / NS_PER_SECOND, len(scores), numbers, where, settings)
        self._on_evaluation(record)

    def _scores(self, chunks: dict[int, Scores]) -> list[HeldOutScore]:
        rows = [(scores, row) for _, scores in sorted(chunks.items()) for row in range(len(scores.values))]
        return [
            HeldOutScore(
                prompt.text, scores.values[row], {name: values[row] for name, values in scores.parts.items()}
            )
            for prompt, (scores, row) in zip(self._prompts, rows, strict=True)
        ]


def _evaluation_of(version: int) -> str:
    return f"the evaluation after {version} steps" if version else "the evaluation of the initial policy"
