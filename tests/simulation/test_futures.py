"""Futures that are simulated once and used again: they end as if they were simulated by themselves."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.scheduling.help.futures import Moment, follow
from digenrl.scheduling.help.help_rules import RULES, Plan, simulate_help
from digenrl.scheduling.state import PlannedBubble
from digenrl.simulation.spec_costs import initial_scheduler_state
from simulation.mixed_slices import mixed_contents


def planned(rounds: list[int]) -> Plan:
    return tuple(PlannedBubble(opens_ns=0, rounds=each) for each in rounds)


@settings(max_examples=60)
@given(
    mixed_contents(helps=("auto",), most_samples=32, colocated=False),
    st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=4), st.sampled_from(RULES)), min_size=2, max_size=12),
)
def test_a_future_that_is_used_again_has_the_same_bubbles_end_and_cost(
    content: dict[str, Any], attempts: list[tuple[list[int], Any]]
) -> None:
    state = initial_scheduler_state(parse_model(Spec, content), search_budget=1)
    bubble = forecast_from_state(state, at_ns=0)
    bubble.start_generators()
    start, counter = Moment(bubble), bubble.counter
    for until in (1, state.terms.steps):
        for rounds, rule in attempts:
            first, alone = counter.nodes, bubble.copy()
            bubbles = simulate_help(alone, until, planned(rounds), rule)
            second = counter.nodes
            followed, end = follow(start, until, planned(rounds), rule)
            assert followed == bubbles
            assert counter.nodes - second == second - first
            assert end.forecast.key() == alone.key()
