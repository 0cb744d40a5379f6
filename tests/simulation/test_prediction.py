"""The prediction of a run from its terms and costs equals the simulation of its SPEC."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from random_specs import spec_contents

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.simulation.prediction import PredictedRun, predict
from digenrl.simulation.simulator import simulate
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.telemetry.trace import Work
from digenrl.units import NS_PER_SECOND

BUDGET = 500


def predicted(content: dict[str, Any], **options: int) -> PredictedRun:
    start = initial_scheduler_state(parse_model(Spec, content), BUDGET)
    generators = [lane.offer for lane in start.lanes if not lane.helper]
    helpers = [lane.offer for lane in start.lanes if lane.helper]
    return predict(start.terms, start.costs, generators, helpers, **{"steps": content["steps"], **options})


@settings(max_examples=30)
@given(spec_contents(helps=("none", "greedy", "search", "auto"), dispatches=("eager", "earliest_finish")))
def test_a_prediction_equals_the_simulation_from_the_same_state(content: dict[str, Any]) -> None:
    run, prediction = simulate(parse_model(Spec, content), BUDGET), predicted(content)
    assert prediction.trace == run.trace
    assert tuple(at / NS_PER_SECOND for at in prediction.commit_ends_ns) == run.answer.step_end
    decisions = tuple((at / NS_PER_SECOND, choice) for at, choice in prediction.help_decisions)
    assert decisions == run.answer.help_decisions


CONTENT = {
    "steps": 2,
    "prompts": 2,
    "samples_per_prompt": 2,
    "slice": 1,
    "generators": [{"count": 2, "seconds": {1: 1}}],
    "trainer": {"seconds_per_sample": 1},
}


def test_any_part_of_a_run_can_be_predicted() -> None:
    later = predicted(CONTENT, steps=3, committed=10, start_ns=7)
    assert {span.step for span in later.trace.spans if span.work is Work.TRAIN} == {10, 11, 12}
    first = predicted(CONTENT, steps=3)
    assert [end - 7 for end in later.commit_ends_ns] == list(first.commit_ends_ns)
    assert later.trace.end_ns == later.commit_ends_ns[-1]
