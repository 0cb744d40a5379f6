"""Model FLOP utilization: the share of the lanes' rate of matrix products that generation and training reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from digenrl.telemetry.trace import Span, Work

NAMES = {"generation_mfu": (Work.GENERATE, Work.HELP), "training_mfu": (Work.TRAIN,)}


@dataclass(frozen=True, slots=True)
class SampleOperations:
    """The counted operations of one sample, and the measured rates of the lanes.

    A lane that joins again has the name of its worker with a counter, as `generator-0 (2)`.
    """

    generate_flop: float
    train_flop: float
    lane_tflops: Mapping[str, float]

    def of(self, work: Work) -> float:
        """The operations of one sample in this kind of work."""
        return self.train_flop if work is Work.TRAIN else self.generate_flop

    def tflops(self, lane: str) -> float:
        """A lane's rate; 0 if it was not measured."""
        return self.lane_tflops.get(lane, self.lane_tflops.get(lane.partition(" (")[0], 0.0))


class FlopMeter:
    """Adds up the operations of finished work and what its lanes could have done in that time."""

    def __init__(self, operations: SampleOperations) -> None:
        self._operations = operations
        self._spans: list[Span] = []

    def add(self, span: Span) -> None:
        if span.size and self._operations.tflops(span.lane):
            self._spans.append(span)

    def next_window(self) -> dict[str, float]:
        """The utilization since the last call, by metric; without those for which nothing was done.

        One above 1 is left out: the rate of its lanes was measured too low, as on a CPU that was busy then.
        """
        spans, self._spans = self._spans, []
        return {name: share for name, works in NAMES.items() if 0 < (share := self._share(spans, works)) <= 1}

    def _share(self, spans: list[Span], works: tuple[Work, ...]) -> float:
        chosen = [span for span in spans if span.work in works]
        done = sum(span.size * self._operations.of(span.work) for span in chosen)
        possible = sum((span.end_ns - span.start_ns) * 1e3 * self._operations.tflops(span.lane) for span in chosen)
        return done / possible if possible else 0.0
