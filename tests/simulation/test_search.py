"""Search and look-ahead: exact if the budget allows it, and never worse than the alternatives."""

from __future__ import annotations

from typing import Any

from hypothesis import Phase, given, settings
from random_specs import evaluation_and_checkpoint, spec_contents

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.scheduling.help.help_rules import GREEDY, WAIT_ALWAYS, simulate_help
from digenrl.scheduling.help.search import least_commit_ns
from digenrl.simulation.makespan import predict_makespan
from digenrl.simulation.simulator import simulate
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.units import NS_PER_SECOND
from simulation.reference_model import reference_answer

HELPS = ("none", "greedy", "search", "auto")
LIVE_BUDGET = 500


def test_search_under_a_live_budget_is_nearly_always_within_one_per_cent_of_exhaustive_search() -> None:
    ratios: list[float] = []

    @settings(max_examples=60, phases=[Phase.generate])
    @given(spec_contents(helps=("search",), colocated=False))
    def collect(content: dict[str, Any]) -> None:
        live = simulate(parse_model(Spec, content), search_budget=LIVE_BUDGET).answer.makespan
        ratios.append(live / reference_answer(content)["makespan"])

    collect()
    assert len(ratios) >= 50 and min(ratios) > 1 - 1e-9
    assert sum(ratio > 1.01 for ratio in ratios) <= 0.05 * len(ratios)


@settings(max_examples=30)
@given(spec_contents(helps=("auto",), dispatches=("eager", "earliest_finish"), most_samples=32, colocated=False))
def test_auto_is_no_worse_than_any_other_rule(content: dict[str, Any]) -> None:
    spec = parse_model(Spec, content)
    auto = simulate(spec).answer.makespan
    for rule in ("none", "greedy", "search"):
        assert auto <= simulate(spec.with_rules(help=rule)).answer.makespan + 1e-9, rule


@settings(max_examples=40)
@given(spec_contents(helps=HELPS, dispatches=("eager", "earliest_finish"), most_samples=32))
def test_a_forecast_of_the_whole_run_is_exact_to_the_nanosecond(content: dict[str, Any]) -> None:
    spec = parse_model(Spec, content)
    assert predict_makespan(spec, 20_000) == simulate(spec, 20_000).answer.makespan


@settings(max_examples=80)
@given(
    spec_contents(helps=("none", "greedy"), dispatches=("eager", "earliest_finish"), colocated=False),
    evaluation_and_checkpoint(),
)
def test_a_forecast_knows_evaluations_and_checkpoints(content: dict[str, Any], more: dict[str, Any]) -> None:
    spec = parse_model(Spec, {**content, **more})
    future = forecast_from_state(initial_scheduler_state(spec, 1), at_ns=0)
    future.start_generators()
    commits = []
    for step in range(1, spec.steps + 1):
        simulate_help(future, step, (), GREEDY if spec.policy.help == "greedy" else WAIT_ALWAYS)
        commits.append(future.now / NS_PER_SECOND)
    assert tuple(commits) == simulate(spec).answer.step_end


def test_auto_helps_while_the_generator_evaluates() -> None:
    """Its chunks keep the only generator from the slices of every step."""
    content = {
        **{"steps": 3, "prompts": 2, "samples_per_prompt": 2, "slice": 1},
        "generators": [{"seconds": {1: 1}}],
        "trainer": {"seconds_per_sample": 0.5, "helper": {"seconds": {1: 3}, "switch_in": 1, "switch_out": 1}},
        "policy": {"help": "auto"},
        "evaluation": {"every": 1, "chunks": 10, "chunk": 2},
    }
    spec = parse_model(Spec, content)
    assert simulate(spec).answer.makespan <= simulate(spec.with_rules(help="greedy")).answer.makespan


@settings(max_examples=25)
@given(spec_contents(helps=("auto", "search"), most_samples=32, colocated=False))
def test_on_policy_even_the_smallest_budget_is_no_worse_than_waiting(content: dict[str, Any]) -> None:
    content["policy"]["stale_fraction"] = 0
    spec = parse_model(Spec, content)
    with_little_budget = simulate(spec, search_budget=1).answer.makespan
    assert with_little_budget <= simulate(spec.with_rules(help="none")).answer.makespan + 1e-9


@settings(max_examples=40)
@given(spec_contents(helps=("search",), colocated=False))
def test_the_lower_bound_of_the_search_is_never_above_the_best_commit(content: dict[str, Any]) -> None:
    """A bound that is too high would cut off the best plan."""
    content["steps"] = 1
    first_bubble = forecast_from_state(
        initial_scheduler_state(parse_model(Spec, content), search_budget=1), at_ns=0
    )
    first_bubble.start_generators()
    assert least_commit_ns(first_bubble) <= round(reference_answer(content)["makespan"] * NS_PER_SECOND)


def test_greedy_runs_its_first_round_even_if_a_group_became_ready_during_the_switch() -> None:
    content = {
        "steps": 1,
        "prompts": 4,
        "samples_per_prompt": 1,
        "slice": 1,
        "generators": [{"seconds": {1: 1}}],
        "trainer": {"seconds_per_sample": 1, "helper": {"seconds": {1: 4}, "switch_in": 1.5}},
        "policy": {"help": "greedy"},
    }
    assert simulate(parse_model(Spec, content)).answer.helped_samples == 1


def test_earliest_finish_keeps_a_slow_lane_from_delaying_the_last_slices() -> None:
    content = {
        "steps": 1,
        "prompts": 1,
        "samples_per_prompt": 4,
        "slice": 1,
        "generators": [{"name": "fast", "seconds": {1: 1}}, {"name": "slow", "seconds": {1: 10}}],
        "trainer": {"seconds_per_sample": 1},
    }
    spec = parse_model(Spec, content)
    assert simulate(spec).answer.makespan == 10 + 4
    assert simulate(spec.with_rules(dispatch="earliest_finish")).answer.makespan == 4 + 4
