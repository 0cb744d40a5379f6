"""Held-out prompts, sampled by the generators with a version's weights while training goes on. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from digenrl.driver.dispatcher import Dispatcher
from digenrl.driver.pending_jobs import Completed
from digenrl.worker.orders import (
    EncodedPrompt,
    EncodePrompts,
    EvaluatePrompts,
    OrderFailed,
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
    """All held-out samples of one version, in the order of their prompts, and the pictures of the first few."""

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


@dataclass(slots=True)
class _Open:
    """An evaluation under way."""

    version: int
    pictures: Path
    chunks_left: int
    answers: dict[int, PromptsEvaluated] = field(default_factory=dict)  # by the place of their first prompt
    failure: tuple[str, OrderFailed] | None = None  # the first, and whose it is


class Evaluator:
    """Spreads held-out prompts over the generators in chunks, has them scored, and puts the answers together.

    An evaluation is whole or it failed: `on_failed` is told once, with a worker and what went wrong there.
    """

    def __init__(
        self,
        runtime: Dispatcher,
        prompts: Sequence[EncodedPrompt],
        *,
        chunk: int,
        shown: int,
        on_done: Callable[[Evaluation], None],
        on_failed: Callable[[int, str, OrderFailed], None],
        on_busy: Callable[[Busy], None] = lambda busy: None,
    ) -> None:
        self._runtime, self._prompts = runtime, tuple(prompts)
        self._chunk, self._shown = chunk, shown
        self._on_done, self._on_failed, self._on_busy = on_done, on_failed, on_busy
        self._open: list[_Open] = []

    def prepare(self) -> None:
        """Has the prompts encoded, for good."""
        self._runtime.ask([(self._runtime.encoder(), EncodePrompts(self._prompts))])

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way."""
        return bool(self._open)

    def start(self, version: int, pictures: Path) -> None:
        """Evaluates the newest weights, which are those of `version`; goes on beside everything else."""
        assert self._runtime.weights is not None and self._runtime.weights[0] == version, "not the newest weights"
        weights, workers = self._runtime.weights[1], self._runtime.generator_workers()
        firsts = range(0, len(self._prompts), self._chunk)
        evaluation = _Open(version, pictures, len(firsts))
        self._open.append(evaluation)
        for index, first in enumerate(firsts):
            chunk = self._prompts[first : first + self._chunk]
            name = f"held-out-{version}-{first}"
            order = EvaluatePrompts(first, chunk, version, weights, name, str(pictures), self._shown)
            self._sample(evaluation, order, workers[index % len(workers)])

    def finish(self) -> None:
        """Waits for what is under way."""
        while self._open:
            self._runtime.receive()

    def _sample(self, evaluation: _Open, order: EvaluatePrompts, worker: str) -> None:
        def sampled(answered: Completed) -> None:
            assert isinstance(answered.report, PromptsSampled)
            self._on_busy(Busy(answered.worker, answered.began_ns, answered.at_ns, evaluation.version))
            scorers = self._runtime.reward_workers()
            scorer = scorers[order.first // self._chunk % len(scorers)] if scorers else answered.worker
            self._score(evaluation, order, scorer)

        def failed(report: OrderFailed) -> None:
            evaluation.failure = evaluation.failure or (worker, report)
            self._close_chunk(evaluation)

        self._runtime.send(worker, order, sampled, failed)

    def _score(self, evaluation: _Open, sampled: EvaluatePrompts, scorer: str) -> None:
        order = ScoreEvaluation(sampled.first, sampled.prompts, sampled.name)

        def scored(answered: Completed) -> None:
            assert isinstance(answered.report, PromptsEvaluated)
            self._on_busy(Busy(answered.worker, answered.began_ns, answered.at_ns, evaluation.version))
            evaluation.answers[order.first] = answered.report
            self._runtime.exchange.drop(order.name)
            self._close_chunk(evaluation)

        def failed(report: OrderFailed) -> None:
            evaluation.failure = evaluation.failure or (scorer, report)
            self._runtime.exchange.drop(order.name)
            self._close_chunk(evaluation)

        def lost() -> None:
            workers = self._runtime.generator_workers()
            self._sample(evaluation, sampled, workers[order.first // self._chunk % len(workers)])

        self._runtime.send(scorer, order, scored, failed, lost)

    def _close_chunk(self, evaluation: _Open) -> None:
        evaluation.chunks_left -= 1
        if evaluation.chunks_left:
            return
        self._open.remove(evaluation)
        if evaluation.failure is not None:
            self._on_failed(evaluation.version, *evaluation.failure)
        else:
            scores = self._put_together(evaluation.answers)
            self._on_done(Evaluation(evaluation.version, scores, evaluation.pictures))

    def _put_together(self, answers: Mapping[int, PromptsEvaluated]) -> tuple[HeldOutScore, ...]:
        scores = []
        for first in sorted(answers):
            batch = answers[first].scores
            for row, reward in enumerate(batch.values):
                parts = {name: values[row] for name, values in batch.parts.items()}
                scores.append(HeldOutScore(self._prompts[first + row].text, reward, parts))
        return tuple(scores)
