"""Search and look-ahead: exact where that is affordable, never worse than what they could have done instead."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from random_specs import spec_contents

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.simulation.quick import quick_makespan
from digenrl.simulation.simulator import simulate
from simulation.reference_model import reference_answer

POLICIES = ("none", "greedy", "search", "auto")
LIVE_BUDGET = 500


@settings(max_examples=150)
@given(spec_contents(helps=("search",), colocated=False))
def test_search_under_a_live_budget_is_within_one_per_cent_of_exhaustive_search(content: dict[str, Any]) -> None:
    spec = parse_model(Spec, content)
    exhaustive = reference_answer(content)["makespan"]
    assert simulate(spec, search_budget=LIVE_BUDGET).answer.makespan <= 1.01 * exhaustive


@settings(max_examples=200)
@given(spec_contents(helps=("auto",), dispatches=("eager", "earliest_finish"), most_samples=32, colocated=False))
def test_auto_loses_to_none_of_the_other_policies(content: dict[str, Any]) -> None:
    spec = parse_model(Spec, content)
    auto = simulate(spec).answer.makespan
    for policy in ("none", "greedy", "search"):
        assert auto <= simulate(spec.with_policy(help=policy)).answer.makespan + 1e-9, policy


@settings(max_examples=300)
@given(spec_contents(helps=POLICIES, dispatches=("eager", "earliest_finish"), most_samples=32))
def test_a_forecast_of_the_whole_run_is_exact_to_the_nanosecond(content: dict[str, Any]) -> None:
    spec = parse_model(Spec, content)
    assert quick_makespan(spec, 20_000) == simulate(spec, 20_000).answer.makespan


@settings(max_examples=100)
@given(spec_contents(helps=("auto", "search"), most_samples=32, colocated=False))
def test_the_smallest_budget_still_gives_a_plan_no_worse_than_waiting_on_policy(content: dict[str, Any]) -> None:
    content["policy"]["stale_fraction"] = 0
    spec = parse_model(Spec, content)
    starved = simulate(spec, search_budget=1).answer.makespan
    assert starved <= simulate(spec.with_policy(help="none")).answer.makespan + 1e-9


def test_earliest_finish_keeps_a_slow_lane_from_holding_up_the_tail() -> None:
    content = {
        "steps": 1,
        "prompts": 1,
        "samples_per_prompt": 4,
        "slice": 1,
        "generators": [{"name": "quick", "seconds": {1: 1}}, {"name": "slow", "seconds": {1: 10}}],
        "trainer": {"seconds_per_sample": 1},
    }
    spec = parse_model(Spec, content)
    assert simulate(spec).answer.makespan == 10 + 4
    assert simulate(spec.with_policy(dispatch="earliest_finish")).answer.makespan == 4 + 4
