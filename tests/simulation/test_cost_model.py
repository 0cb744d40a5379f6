"""The simulator follows the stated cost model: worked examples, and an independent oracle."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import evaluation_and_checkpoint, spec_contents

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.spec import Spec
from digenrl.simulation.simulator import simulate
from simulation.reference_model import reference_answer

HELPED = {
    "steps": 1,
    "prompts": 2,
    "samples_per_prompt": 2,
    "slice": 1,
    "generators": [{"seconds": {1: 4}}],
    "trainer": {
        "seconds_per_sample": 1,
        "helper": {"lanes": 1, "seconds": {1: 5}, "switch_in": 0.5, "switch_out": 0.5},
    },
}
SCORED = {
    "steps": 2,
    "prompts": 2,
    "samples_per_prompt": 2,
    "slice": 1,
    "generators": [{"seconds": {1: 2}}, {"seconds": {1: 3}}],
    "reward": {"lanes": 1, "seconds": 0.5},
    "trainer": {"seconds_per_sample": 1, "commit": 0.5},
    "publish": 1,
}


def answer(content: dict[str, Any], **policy: Any) -> dict[str, Any]:
    """The simulator's answer, as it would be printed."""
    merged = {**content, "policy": {**content.get("policy", {}), **policy}}
    return asdict(simulate(parse_model(Spec, merged)).answer)


@pytest.mark.parametrize(("rule", "makespan"), [("none", 18), ("greedy", 14), ("search", 14), ("auto", 14)])
def test_the_worked_example_of_help(rule: str, makespan: float) -> None:
    assert answer(HELPED, help=rule)["makespan"] == makespan


def test_search_helps_once_if_a_second_round_would_cost_a_second() -> None:
    assert answer(HELPED, help="search")["helped_samples"] == 1


def test_the_worked_example_with_scores_and_publishing() -> None:
    result = answer(SCORED)
    assert result["step_end"] == (9, 19)
    assert result["bound"] == pytest.approx(9.6, abs=1e-9)


def assert_equal_answers(ours: dict[str, Any], oracle: dict[str, Any]) -> None:
    assert set(ours) == set(oracle)
    for key, expected in oracle.items():
        if key == "help_decisions":
            assert [choice for _, choice in ours[key]] == [choice for _, choice in expected]
            assert [at for at, _ in ours[key]] == pytest.approx([at for at, _ in expected], abs=1e-6)
        else:
            assert ours[key] == pytest.approx(expected, abs=1e-6), key


@settings(max_examples=60)
@given(spec_contents())
def test_every_answer_equals_the_oracle(content: dict[str, Any]) -> None:
    assert_equal_answers(answer(content), reference_answer(content))


@settings(max_examples=30)
@given(spec_contents(helps=("none", "greedy"), most_samples=48))
def test_larger_runs_with_the_slice_left_open_equal_the_oracle(content: dict[str, Any]) -> None:
    content = {**content, "slice": "auto"}
    assert_equal_answers(answer(content), reference_answer(content))


@settings(max_examples=40)
@given(spec_contents(helps=("none", "greedy")), st.integers(1, 3), evaluation_and_checkpoint())
def test_every_answer_with_evaluations_and_checkpoints_equals_the_oracle(
    content: dict[str, Any], batch: int, more: dict[str, Any]
) -> None:
    content["reward"]["batch"] = batch
    assert_equal_answers(answer({**content, **more}), reference_answer({**content, **more}))


@pytest.mark.parametrize(
    "more",
    [
        {"reward": {"lanes": 2, "seconds": 1, "batch": 3}},  # slices of 4 are scored in a batch of 3 and one of 1
        {"evaluation": {"every": 1, "chunks": 1, "chunk": 5}},
    ],
)
def test_an_open_slice_is_chosen_with_the_times_of_batches_and_evaluations(more: dict[str, Any]) -> None:
    largest_s = 5 if "reward" in more else 3
    content = {
        **{"steps": 2, "prompts": 2, "samples_per_prompt": 4, "slice": "auto", "policy": {"stream": "sample"}},
        "generators": [{"count": 2, "seconds": {1: 2, 4: largest_s}}],
        "trainer": {"seconds_per_sample": 0.5},
        **more,
    }
    assert answer(content)["makespan"] == min(answer({**content, "slice": size})["makespan"] for size in (1, 2, 4))


def test_a_version_to_be_evaluated_is_published_before_the_next_commit() -> None:
    """Stale samples would allow the commit at 3 s, but version 1 waits for the evaluation of version 0."""
    content = {
        "steps": 3,
        "prompts": 1,
        "samples_per_prompt": 1,
        "slice": 1,
        "generators": [{"count": 2, "seconds": {1: 1}}],
        "trainer": {"seconds_per_sample": 1},
        "evaluation": {"every": 1, "chunks": 1, "chunk": 100},
        "policy": {"stale_fraction": 1},
    }
    result = answer(content)
    assert result["step_end"] == (2, 100, 200)
    assert result["makespan"] == 400
    assert_equal_answers(result, reference_answer(content))


def test_times_are_exact_decimals_and_not_floats() -> None:
    """0.1 + 0.2 in floats is not 0.3; three steps of 0.1 s samples must end at exactly 0.9 s."""
    content = {**HELPED, "steps": 3, "prompts": 1, "samples_per_prompt": 1}
    content["generators"] = [{"seconds": {1: 0.1}}]
    content["trainer"] = {"seconds_per_sample": 0.2}
    assert answer(content)["step_end"] == (0.3, 0.6, 0.9)


def test_a_stale_budget_is_an_exact_floor() -> None:
    """0.29 x 100 is 28.999... in floats; 29 samples may be stale."""
    content = {**SCORED, "prompts": 10, "samples_per_prompt": 10, "trainer": {"seconds_per_sample": 50}}
    assert answer(content, stale_fraction=0.29)["stale_samples"] == 29


def test_no_two_lanes_share_a_name_even_if_pools_do() -> None:
    content = {
        **HELPED,
        "generators": [{"seconds": {1: 4}}, {"name": "helper", "seconds": {1: 4}}, {"seconds": {1: 5}}],
    }
    spec = parse_model(Spec, {**content, "policy": {"help": "auto"}})
    names = [lane.name for lane in simulate(spec).trace.lanes]
    assert names == ["generator-0", "helper-0", "generator-1", "trainer", "helper-1"]
    with pytest.raises(ConfigError, match=r"generators\[0\].name: 'reward' is the name of the reward lanes"):
        parse_model(Spec, {**HELPED, "generators": [{"name": "reward", "seconds": {1: 4}}]})
