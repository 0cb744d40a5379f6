"""Reward lanes that score several samples at once: the oracle agrees, and forecasts are exact."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import spec_contents

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import Action, Event, Score, Slice, Tick
from digenrl.scheduling import SchedulerState, Terms, decide
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.scheduling.help.help_rules import WAIT_ALWAYS, simulate_help
from digenrl.scheduling.state import Free
from digenrl.simulation.makespan import predict_makespan
from digenrl.simulation.simulator import simulate
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from simulation.reference_model import reference_answer

HELPS = ("none", "greedy", "search", "auto")
DISPATCHES = ("eager", "earliest_finish")
# One prompt of six samples in one slice; a score takes a second.
ONE_SLICE = {
    "steps": 1,
    "prompts": 1,
    "samples_per_prompt": 6,
    "slice": 6,
    "generators": [{"seconds": {6: 10}}],
    "reward": {"lanes": 2, "seconds": 1},
    "trainer": {"seconds_per_sample": 0.001},
}


def with_batch(content: dict[str, Any], batch: int) -> dict[str, Any]:
    """The same SPEC with rewards in batches of this size."""
    return {**content, "reward": {**content["reward"], "batch": batch}}


@settings(max_examples=50)
@given(spec_contents(), st.integers(2, 5))
def test_every_answer_with_batches_equals_the_oracle(content: dict[str, Any], batch: int) -> None:
    content = with_batch(content, batch)
    ours, oracle = simulate(parse_model(Spec, content)).answer, reference_answer(content)
    assert ours.step_end == pytest.approx(oracle["step_end"], abs=1e-6)
    assert [choice for _, choice in ours.help_decisions] == [choice for _, choice in oracle["help_decisions"]]


@st.composite
def batched_contents(draw: st.DrawFn, helps: tuple[str, ...]) -> dict[str, Any]:
    """SPECs whose forecast is exact: batches that divide the slice, or one reward lane and no single samples."""
    content = draw(spec_contents(helps=helps, dispatches=DISPATCHES, colocated=False))
    size = content["slice"] = max(content["slice"], draw(st.sampled_from([1, content["samples_per_prompt"]])))
    lanes, batch = draw(st.integers(1, 3)), draw(st.integers(2, 9))
    if size % min(batch, size) and (lanes > 1 or content["policy"]["stream"] == "sample"):
        batch = draw(st.sampled_from([part for part in range(1, size + 1) if size % part == 0]))
    content["reward"] = {"lanes": lanes, "seconds": draw(st.sampled_from([0.01, 0.1, 0.5])), "batch": batch}
    return content


@settings(max_examples=60)
@given(batched_contents(HELPS))
def test_the_forecast_of_a_whole_run_with_batches_is_exact(content: dict[str, Any]) -> None:
    spec = parse_model(Spec, content)
    assert predict_makespan(spec, 20_000) == simulate(spec, 20_000).answer.makespan


@settings(max_examples=25)
@given(batched_contents(("none",)))
def test_a_forecast_from_any_bubble_ends_when_the_run_does(content: dict[str, Any]) -> None:
    """That includes bubbles in the middle of a batch."""
    state = initial_scheduler_state(parse_model(Spec, content), 100)
    cluster, ends = VirtualCluster(state), set[int]()
    while not state.finished:
        event = cluster.next_event()
        state, actions = decide(state, event)
        for action in actions:
            cluster.submit(action)
        if isinstance(event, Tick) and isinstance(state.trainer, Free):
            future = forecast_from_state(state, event.at_ns)
            simulate_help(future, state.terms.steps, (), WAIT_ALWAYS)
            ends.add(future.now)
    assert ends <= {cluster.now_ns}


@pytest.mark.parametrize(
    ("batch", "scored_s"),
    [(1, 3), (2, 4), (3, 3), (4, 4), (5, 5), (6, 6), (100, 6)],
    ids=lambda value: str(value),
)
def test_two_lanes_share_a_slice_in_batches_and_a_batch_is_never_more_than_a_slice(
    batch: int, scored_s: int
) -> None:
    makespan = simulate(parse_model(Spec, with_batch(ONE_SLICE, batch))).answer.makespan
    assert makespan == pytest.approx(10 + scored_s + 6 * 0.001)


class ScoreJobs:
    """Records what reward lanes are given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.slices: set[int] = set()

    def observe(self, event: Event, actions: tuple[Action, ...], state: SchedulerState) -> None:
        for action in actions:
            if isinstance(action, Score):
                assert isinstance(action.piece, Slice)
                self.sizes.append(action.piece.size)
                self.slices.add(action.piece.first // state.terms.slice_size)


def test_a_batch_holds_samples_of_one_slice_only() -> None:
    content = {**with_batch(ONE_SLICE, 4), "slice": 3, "generators": [{"count": 2, "seconds": {3: 10}}]}
    content["reward"]["lanes"] = 1
    initial, jobs = initial_scheduler_state(parse_model(Spec, content), 100), ScoreJobs()
    drive(initial, VirtualCluster(initial), (jobs,))
    assert (jobs.sizes, jobs.slices) == ([3, 3], {0, 1})


def test_without_reward_lanes_generators_score_and_there_are_no_score_jobs() -> None:
    content = {**ONE_SLICE, "reward": {"lanes": 0, "batch": 2}}
    initial, jobs = initial_scheduler_state(parse_model(Spec, content), 100), ScoreJobs()
    assert drive(initial, VirtualCluster(initial), (jobs,)).finished
    assert jobs.sizes == []


def test_a_batch_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.batch"):
        parse_model(Spec, with_batch(ONE_SLICE, 0))


@pytest.mark.parametrize(("batch", "unit"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 1), (6, 6), (8, 6)])
def test_every_batch_of_a_slice_is_a_whole_number_of_units(batch: int, unit: int) -> None:
    terms = Terms(steps=1, prompts=1, samples_per_prompt=6, slice_size=6, score_batch=batch)
    assert terms.score_unit == unit
