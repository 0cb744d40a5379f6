"""What run.json says about a run's initial state, from which its journal can be replayed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from digenrl.scheduling import RecordedStep, SchedulerState

RECORDED = "recorded"  # what an interrupted run has to repeat, among the facts of the initial state


def initial_facts(state: SchedulerState) -> dict[str, Any]:
    """An initial state as JSON, for run.json."""
    costs = asdict(state.costs) | {"train_sample_ns": str(state.costs.train_sample_ns)}
    lanes = [
        asdict(lane.offer) | {"train_sample_ns": str(lane.train_sample_ns), "helper": lane.helper}
        for lane in state.lanes
    ]
    return {
        "terms": asdict(state.terms),
        "costs": costs,
        "lanes": lanes,
        "committed": state.committed,
        "jobs_issued": state.jobs_issued,
        "evaluations": [each.version for each in state.evaluations],
        "served": min(lane.version for lane in state.lanes),
        RECORDED: [asdict(step) for step in state.recorded],
    }


def recorded_steps(facts: Iterable[dict[str, Any]]) -> tuple[RecordedStep, ...]:
    """The records that were written as JSON."""
    return tuple(
        RecordedStep(step["index"], tuple((group, samples) for group, samples in step["stale"]), step["closed"])
        for step in facts
    )
