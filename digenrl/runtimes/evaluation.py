"""Held-out prompts, sampled by the generators with a version's weights while training goes on. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from digenrl.runtimes.runtime import Answered, WorkRuntime
from digenrl.workers.orders import (
    EncodedPrompt,
    EncodePrompts,
    EvaluatePrompts,
    Order,
    PromptsEvaluated,
    PromptsSampled,
    ScoreEvaluation,
)


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """One held-out sample's reward and its parts."""

    prompt: str
    reward: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All held-out samples of one version, in the order of their prompts; a folder has pictures of the first few."""

    version: int
    scores: tuple[HeldOutScore, ...]
    pictures: Path


@dataclass(frozen=True, slots=True)
class Busy:
    """What a lane did for an evaluation, for the trace."""

    worker: str
    began_ns: int
    ended_ns: int
    version: int


class Evaluator:
    """Spreads held-out prompts over the generators in chunks, has them scored, and puts the answers together."""

    def __init__(
        self,
        runtime: WorkRuntime,
        prompts: Sequence[EncodedPrompt],
        *,
        chunk: int,
        shown: int,
        on_done: Callable[[Evaluation], None],
        on_busy: Callable[[Busy], None] = lambda busy: None,
    ) -> None:
        self._runtime, self._prompts = runtime, tuple(prompts)
        self._chunk, self._shown = chunk, shown
        self._on_done, self._on_busy = on_done, on_busy
        self._open = 0

    def prepare(self) -> None:
        """Has the prompts encoded, for good."""
        self._runtime.ask([(self._runtime.encoder(), EncodePrompts(self._prompts))])

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way."""
        return self._open > 0

    def start(self, version: int, pictures: Path) -> None:
        """Evaluates the newest weights, which are those of `version`; goes on beside everything else."""
        workers = self._runtime.generator_workers()
        for worker in workers:
            self._runtime.bring_newest_weights(worker)
        answers: dict[int, PromptsEvaluated] = {}
        for index, first in enumerate(range(0, len(self._prompts), self._chunk)):
            self._open += 1
            chunk = self._prompts[first : first + self._chunk]
            order = EvaluatePrompts(first, chunk, str(pictures), self._shown)
            worker = workers[index % len(workers)]
            self._runtime.send(worker, order, self._sampled(worker, version, pictures, answers))

    def finish(self) -> None:
        """Waits for what is under way."""
        while self._open:
            self._runtime.receive()

    def _sampled(
        self, worker: str, version: int, pictures: Path, answers: dict[int, PromptsEvaluated]
    ) -> Callable[[Answered], None]:
        def sampled(answered: Answered) -> None:
            report = answered.report
            assert isinstance(report, PromptsSampled)
            self._on_busy(Busy(worker, answered.began_ns, answered.at_ns, version))
            scorers = self._runtime.reward_workers()
            scorer = scorers[report.first // self._chunk % len(scorers)] if scorers else worker
            order: Order = ScoreEvaluation(report.first, report.prompts, report.name)
            self._runtime.send(scorer, order, self._scored(scorer, version, pictures, answers))

        return sampled

    def _scored(
        self, scorer: str, version: int, pictures: Path, answers: dict[int, PromptsEvaluated]
    ) -> Callable[[Answered], None]:
        def scored(answered: Answered) -> None:
            report = answered.report
            assert isinstance(report, PromptsEvaluated)
            self._on_busy(Busy(scorer, answered.began_ns, answered.at_ns, version))
            answers[report.first] = report
            self._open -= 1
            if sum(len(each.scores.values) for each in answers.values()) == len(self._prompts):
                self._on_done(Evaluation(version, self._put_together(answers), pictures))

        return scored

    def _put_together(self, answers: Mapping[int, PromptsEvaluated]) -> tuple[HeldOutScore, ...]:
        scores = []
        for first in sorted(answers):
            batch = answers[first].scores
            for row, reward in enumerate(batch.values):
                parts = {name: values[row] for name, values in batch.parts.items()}
                scores.append(HeldOutScore(self._prompts[first + row].text, reward, parts))
        return tuple(scores)
