"""Simulated runs for tests of what watches a live one: real schedules, real spans, a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import Observer, drive
from digenrl.metrics.flop_use import SampleOperations
from digenrl.metrics.step_metrics import MetricSink, StepMetrics
from digenrl.records import Action, Event
from digenrl.run_folder.metric_lines import EvaluationRecord
from digenrl.scheduling import SchedulerState
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import Faults, VirtualCluster
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import Span

SPEC: dict[str, Any] = {
    "steps": 4,
    "prompts": 4,
    "samples_per_prompt": 4,
    "slice": 2,
    "generators": [
        {"name": "a100", "count": 2, "seconds": {1: 1.0, 2: 1.7}},
        {"name": "l40s", "count": 1, "seconds": {1: 2.0, 2: 3.1}},
    ],
    "reward": {"lanes": 2, "seconds": 0.25},
    "trainer": {
        "seconds_per_sample": 0.3,
        "commit": 0.5,
        "helper": {"lanes": 2, "seconds": {1: 1.4, 2: 2.0}, "switch_in": 0.1, "switch_out": 0.1},
    },
    "publish": 0.4,
    "policy": {"help": "greedy", "stale_fraction": 0.25},
}


# Changes of SPEC with which every lane except the l40s both generates and trains.
BOTH: dict[str, Any] = {
    "generators": [
        {"name": "a100", "count": 2, "seconds": {1: 1.0, 2: 1.7}, "train_seconds": 0.7, "switch": 0.1},
        {"name": "l40s", "count": 1, "seconds": {1: 2.0, 2: 3.1}},
    ],
    "trainer": {**SPEC["trainer"], "job": 2, "reduce": 0.1},
    "policy": {"help": "auto", "assist": "both", "stale_fraction": 0.25},
}


class KeptNumbers:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[EvaluationRecord] = []
        self.closed = False

    def step(self, numbers: Any) -> None:
        self.steps.append(dict(numbers))

    def evaluation(self, evaluation: EvaluationRecord) -> None:
        self.evaluations.append(evaluation)

    def close(self) -> None:
        self.closed = True


class AfterEach:
    """An observer that calls a function after every decision."""

    def __init__(self, call: Callable[[Event, Sequence[Action], SchedulerState], None]) -> None:
        self.observe = call


def initial_state_of(spec: Spec | None = None, **changes: Any) -> SchedulerState:
    """The state at the start of SPEC with some of its top-level keys changed, or of another."""
    return initial_scheduler_state(spec or parse_model(Spec, {**SPEC, **changes}), search_budget=200)


def watch(
    initial: SchedulerState,
    sinks: Sequence[MetricSink],
    *,
    faults: Faults | None = None,
    before: Sequence[Observer] = (),
    after: Sequence[Observer] = (),
    cluster: VirtualCluster | None = None,
    on_span: Callable[[Span], None] | None = None,
) -> StepMetrics:
    """Drives a run to its end with StepMetrics behind the recorder, as a live run has them."""
    lanes = ("trainer", *(lane.name for lane in initial.lanes))
    metrics = StepMetrics(initial, sinks, operations=SampleOperations(1e9, 1e9, dict.fromkeys(lanes, 1.0)))

    def take(span: Span) -> None:
        metrics.add_span(span)
        if on_span is not None:
            on_span(span)

    recorder = Recorder(initial, sink=take)
    observers = (*before, recorder, metrics, *after)
    drive(initial, cluster or VirtualCluster(initial, faults), observers)
    return metrics
