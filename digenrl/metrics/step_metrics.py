"""The metrics of a run: one flat mapping per optimizer step and one record per evaluation, sent to every sink."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from digenrl.metrics import flop_use
from digenrl.metrics.busy import BusyMeter
from digenrl.metrics.flop_use import FlopMeter, SampleOperations
from digenrl.metrics.sample_counts import SampleCounter
from digenrl.records import Action, Commit, Committed, Event, WorkerJoined, WorkerLost
from digenrl.run_folder.metric_lines import EvaluationRecord
from digenrl.scheduling import SchedulerState
from digenrl.telemetry.trace import Span, Work, lane_work
from digenrl.units import NS_PER_SECOND

BUSY_PREFIX = "busy/"
_COMPUTED_HERE = {
    *("step", "at_s", "step_s", "version"),
    *("samples", "samples_per_s", "stale_share", "helped_share", "assisted_share"),
    *flop_use.NAMES,
}


class MetricSink(Protocol):
    """A destination for metrics. Values that are not finite arrive unchanged."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """Takes one optimizer step; "step" counts from 0, "version" is the number of optimizer steps done."""

    def evaluation(self, evaluation: EvaluationRecord) -> None:
        """Takes one evaluation."""

    def close(self) -> None:
        """Ends the sink; nothing follows."""


class StepMetrics:
    """An observer that computes a step's timing and sample shares, and combines them with reported metrics.

    It must come after the recorder among the observers, as a step ends with the span of its commit. The first step
    of a resumed run starts at `start_ns`. Model FLOP utilization is computed if the `operations` are known.
    """

    def __init__(
        self,
        initial: SchedulerState,
        sinks: Sequence[MetricSink],
        start_ns: int = 0,
        operations: SampleOperations | None = None,
    ) -> None:
        self._sinks = tuple(sinks)
        self._busy = BusyMeter(initial, start_ns)
        self._flop = None if operations is None else FlopMeter(operations)
        self._samples = SampleCounter(initial)
        self._step_start_ns = start_ns
        self._step = initial.committed
        self._stale_samples = 0
        self._reported: dict[int, dict[str, float]] = {}

    def add_span(self, span: Span) -> None:
        """Takes a closed span of the trace."""
        self._busy.add(span)
        if self._flop is not None:
            self._flop.add(span)

    def report(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Adds metrics of a step. None is ignored; a second value of a metric replaces the first.

        They are written when the step is committed. What arrives later, as the time of publishing, is written with
        the next step, during which it was measured.
        """
        computed = sorted(name for name in metrics if name in _COMPUTED_HERE or name.startswith(BUSY_PREFIX))
        assert not computed, f"{computed} are computed here and cannot be reported"
        known = {name: value for name, value in metrics.items() if value is not None}
        self._reported.setdefault(max(step, self._step), {}).update(known)

    def evaluated(self, evaluation: EvaluationRecord) -> None:
        """Passes an evaluation to every sink."""
        for sink in self._sinks:
            sink.evaluation(evaluation)

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        if isinstance(event, WorkerJoined):
            self._busy.joined(event.offer.name, event.at_ns)
        elif isinstance(event, WorkerLost) and event.pool == "generator":
            self._busy.left(state.lanes[event.lane].name, event.at_ns)
        self._samples.observe(event, actions)
        if any(isinstance(action, Commit) for action in actions):
            self._stale_samples = state.current.stale_samples
        if isinstance(event, Committed):
            self._finish_step(event, state)

    def _finish_step(self, event: Committed, state: SchedulerState) -> None:
        step, samples = event.job.step, state.terms.samples_per_step
        counts = self._samples.take(step)
        step_s = (event.at_ns - self._step_start_ns) / NS_PER_SECOND
        metrics: dict[str, float] = {
            "step": step,
            "at_s": event.at_ns / NS_PER_SECOND,
            "step_s": step_s,
            "samples": samples,
            "stale_share": self._stale_samples / samples,
            "helped_share": counts.helped / samples,
            "version": state.committed,
        }
        if state.terms.shares_work:
            metrics["assisted_share"] = counts.assisted / samples
        if step_s > 0:
            metrics["samples_per_s"] = samples / step_s
        if self._flop is not None:
            metrics |= self._flop.next_window()
        metrics |= self._reported.pop(step, {})
        shares = self._busy.next_window(event.at_ns, _open_spans(state, event.at_ns))
        metrics |= {f"{BUSY_PREFIX}{lane}": share for lane, share in shares.items()}
        self._step_start_ns, self._step = event.at_ns, step + 1
        for sink in self._sinks:
            sink.step(metrics)


def _open_spans(state: SchedulerState, now_ns: int) -> Iterator[Span]:
    """The current work of generators and scorers, up to now; at a commit the trainer has none."""
    for lane in state.present_lanes:
        if lane.job is not None:
            work = lane_work(lane.job, helps=lane.helper and not state.terms.colocated)
            yield Span(lane.name, work, lane.job.issued_ns, now_ns, state.committed)
    for index, score in enumerate(state.scorers):
        if score is not None:
            yield Span(f"reward-{index}", Work.SCORE, score.issued_ns, now_ns, state.committed)
