"""Lanes that take several slices at once: the same promises and samples, and faster where it should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import spec_contents

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import (
    Action,
    Calibrated,
    CostsMeasured,
    Event,
    Generate,
    Generated,
    JobFailed,
    LaneOffer,
    Slice,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import Costs, SchedulerState, Terms, decide, initial_state
from digenrl.scheduling.help.forecast_constants import NEVER
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.scheduling.help.help_rules import GREEDY, WAIT_ALWAYS, simulate_help
from digenrl.scheduling.help.lookahead import look_ahead
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.makespan import predict_makespan
from digenrl.simulation.simulator import simulate
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from simulation.mixed_slices import mixed_contents
from simulation.noisy_cluster import NoisyCluster
from simulation.random_faults import TrainedSamples, faults_for

SECOND = 1_000_000_000


class JobSizes:
    """Checks that every Generate job holds whole slices, and no more than its lane takes at once."""

    def __init__(self, initial: SchedulerState) -> None:
        self._slice_size = initial.terms.slice_size
        self._at_once = {lane.index: lane.slices_at_once for lane in initial.lanes}

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        if isinstance(event, WorkerJoined):
            self._at_once[len(self._at_once)] = event.offer.slices_at_once
        elif isinstance(event, Calibrated):
            self._at_once[event.job.lane] = event.offer.slices_at_once
        for action in actions:
            if isinstance(action, Generate):
                slices, rest = divmod(action.slice.size, self._slice_size)
                assert not rest and 1 <= slices <= self._at_once[action.lane]


def with_helpers_that_take(initial: SchedulerState, at_once: int) -> SchedulerState:
    """The same initial state, with helpers that take several slices at once."""
    offers = [lane.offer for lane in initial.lanes if not lane.helper]
    helpers = [LaneOffer(lane.name, lane.slice_ns, at_once) for lane in initial.lanes if lane.helper]
    return initial_state(initial.terms, initial.costs, offers, helpers)


@settings(max_examples=70)
@given(st.data())
def test_every_promise_holds_after_every_event_whatever_lanes_take_at_once(data: st.DataObject) -> None:
    spec = parse_model(Spec, data.draw(mixed_contents()))
    initial = initial_scheduler_state(spec, search_budget=data.draw(st.sampled_from([1, 200])))
    if data.draw(st.booleans()):
        initial = with_helpers_that_take(initial, 2)
    trained, cluster = TrainedSamples(), VirtualCluster(initial, data.draw(faults_for(initial, most_at_once=3)))
    assert drive(initial, cluster, (Auditor(initial), trained, JobSizes(initial))).finished
    trained.check(initial)


@settings(max_examples=25)
@given(mixed_contents(most_samples=24), st.integers(1, 4), st.integers(0, 2), st.integers(0, 10**6))
def test_every_run_ends_with_random_times_and_faults(
    content: dict[str, Any], batch: int, scorers: int, seed: int
) -> None:
    content["reward"] |= {"batch": batch, "lanes": scorers}
    initial = initial_scheduler_state(parse_model(Spec, content), search_budget=100)
    trained = TrainedSamples()
    assert drive(initial, NoisyCluster(initial, seed), (Auditor(initial), trained, JobSizes(initial))).finished
    trained.check(initial)


def test_lanes_do_not_leave_slices_to_each_other_for_ever() -> None:
    """One lane is fastest with a single slice but takes two, and either of the others is faster with two."""
    policy = {"order": "generation", "stream": "group", "help": "none", "dispatch": "earliest_finish"}
    pair = {"name": "pair", "count": 1, "seconds": {1: 0.9, 2: 2.8}, "slice": 2}
    single = {"name": "single", "count": 2, "seconds": {1: 1.2}}
    content = {"steps": 1, "prompts": 1, "samples_per_prompt": 2, "slice": 1, "generators": [pair, single]}
    content |= {"trainer": {"seconds_per_sample": 1.0}, "policy": policy}
    spec = parse_model(Spec, content)
    assert simulate(spec).answer.makespan == pytest.approx(1.2 + 2.0)
    assert predict_makespan(spec) == simulate(spec).answer.makespan


@settings(max_examples=25)
@given(mixed_contents(helps=("auto",), most_samples=32, colocated=False))
def test_by_its_own_prediction_looking_ahead_is_no_worse_than_waiting_or_greedy_help(
    content: dict[str, Any],
) -> None:
    initial = initial_scheduler_state(parse_model(Spec, content), search_budget=1)
    bubble = forecast_from_state(initial, at_ns=0)
    bubble.start_generators()
    ends = []
    for plan, rule in ((look_ahead(bubble, 10**6), WAIT_ALWAYS), ((), WAIT_ALWAYS), ((), GREEDY)):
        future = bubble.fork()
        simulate_help(future, initial.terms.steps, plan, rule)
        ends.append(future.now)
    assert ends[0] <= min(ends[1:]) < NEVER


@settings(max_examples=25)
@given(mixed_contents(helps=("none", "greedy"), most_samples=32))
def test_a_forecast_is_within_a_factor_of_two_of_the_run(content: dict[str, Any]) -> None:
    spec = parse_model(Spec, content)
    assert 0.5 <= predict_makespan(spec) / simulate(spec).answer.makespan <= 2


@settings(max_examples=60)
@given(mixed_contents(helps=("none",), most_samples=32))
def test_one_pool_that_takes_several_slices_is_forecast_exactly_in_generation_order(
    content: dict[str, Any],
) -> None:
    del content["generators"][1:]
    content["policy"] |= {"order": "generation", "colocated": False, "stale_fraction": 0}
    spec = parse_model(Spec, content)
    assert predict_makespan(spec) == simulate(spec).answer.makespan


@settings(max_examples=25)
@given(spec_contents(helps=("none", "greedy", "search"), dispatches=("eager", "earliest_finish")))
def test_taking_several_slices_at_once_equals_larger_slices(content: dict[str, Any]) -> None:
    """If every pool takes the same number of slices and nothing smaller is left."""
    content["policy"]["help"], content["policy"]["stale_fraction"] = "none", 0
    content["policy"] |= {"colocated": False, "stream": "batch", "dispatch": "eager"}
    content["reward"]["lanes"] = 0
    own = content["slice"]
    pools = [{**pool, "slice": own} for pool in content["generators"]]
    for pool in pools:
        pool["seconds"] = {**pool["seconds"], own: pool["seconds"].get(own, 20.0)}
    whole = parse_model(Spec, {**content, "generators": [{**pool, "slice": None} for pool in pools]})
    taken = parse_model(Spec, {**content, "slice": 1, "generators": pools})
    assert simulate(taken).answer.makespan == simulate(whole).answer.makespan


# --- Single decisions ----------------------------------------------------------------------------------------


def opened(offers: list[LaneOffer], **terms: Any) -> SchedulerState:
    """The initial state of two groups of eight samples, in slices of one, on these lanes."""
    fields = {"steps": 2, "prompts": 2, "samples_per_prompt": 8, "slice_size": 1, **terms}
    return initial_state(Terms(**fields), Costs(Fraction(SECOND)), offers)


def handed(actions: tuple[Action, ...]) -> list[tuple[int, Slice]]:
    return [(action.lane, action.slice) for action in actions if isinstance(action, Generate)]


BIG, SMALL = LaneOffer("big", 4 * SECOND, 4), LaneOffer("small", 5 * SECOND)


def test_a_lane_takes_neighboring_slices_of_one_group_as_one_job() -> None:
    state, actions = decide(opened([BIG, BIG, BIG, SMALL]), Tick(0))
    assert handed(actions) == [
        (0, Slice(0, 0, 0, 4)),
        (1, Slice(0, 0, 4, 4)),
        (2, Slice(0, 1, 0, 4)),
        (3, Slice(0, 1, 4, 1)),
    ]
    assert [lane.expected_ns(1) for lane in state.lanes] == [SECOND, SECOND, SECOND, 5 * SECOND]


def test_in_batch_order_slices_taken_ahead_are_not_handed_out_again() -> None:
    state, actions = decide(opened([BIG, SMALL, SMALL], order="batch"), Tick(0))
    assert handed(actions) == [(0, Slice(0, 0, 0, 4)), (1, Slice(0, 1, 0, 1)), (2, Slice(0, 1, 1, 1))]
    # Of the list 00 10 01 11 02 12 03 13 ... the slice 12 comes next, and 03 is taken ahead.
    assert (state.current.cursor, state.current.ahead) == (5, (6,))


def test_a_lane_takes_fewer_slices_at_the_end_of_a_group() -> None:
    _, actions = decide(opened([BIG, BIG], samples_per_prompt=6, prompts=1), Tick(0))
    assert handed(actions) == [(0, Slice(0, 0, 0, 4)), (1, Slice(0, 0, 4, 2))]


def test_a_lane_takes_fewer_slices_if_the_stale_budget_requires_it() -> None:
    state = opened([BIG, BIG, BIG], prompts=1, stale_budget=3)
    _, actions = decide(state, Tick(0))
    assert handed(actions) == [(0, Slice(0, 0, 0, 4)), (1, Slice(0, 0, 4, 4)), (2, Slice(1, 0, 0, 3))]


def test_a_lost_job_is_reissued_in_parts_to_lanes_that_take_fewer_slices() -> None:
    state, _ = decide(opened([BIG, SMALL]), Tick(0))
    state, _ = decide(state, WorkerLost(1, 0))
    job = state.lanes[1].job
    assert isinstance(job, Generate) and job.slice == Slice(0, 0, 4, 1)
    state, _ = decide(state, Generated(2, job, version=0))
    for _ in range(2):
        state, _ = decide(state, WorkerJoined(2, LaneOffer("pair", SECOND, 2)))
    lanes = tuple(replace(lane, version=0) for lane in state.lanes)
    _, actions = decide(replace(state, lanes=lanes), Tick(2))
    assert handed(actions) == [(2, Slice(0, 0, 0, 2)), (3, Slice(0, 0, 2, 2)), (1, Slice(0, 0, 5, 1))]


def test_a_failed_job_is_reissued_whole_to_a_lane_that_takes_as_many_slices() -> None:
    state, actions = decide(opened([BIG]), Tick(0))
    job = next(action for action in actions if isinstance(action, Generate))
    state, _ = decide(state, JobFailed(1, job, "out of memory"))
    _, actions = decide(state, Tick(1))
    assert handed(actions) == [(0, job.slice)]


def test_slices_of_a_quarantined_group_are_not_handed_out() -> None:
    state, actions = decide(opened([BIG, SMALL]), Tick(0))
    job = next(action for action in actions if isinstance(action, Generate))
    state, _ = decide(state, Generated(1, job, version=0, score_failure="no number"))
    _, actions = decide(state, Tick(1))
    assert handed(actions) == [(0, Slice(0, 2, 0, 4))]  # its replacement comes first


def test_the_measured_time_of_a_full_job_scales_the_smaller_ones() -> None:
    state = opened([LaneOffer("big", 40, 4, (16, 24, 32, 40))])
    measured = CostsMeasured(0, Fraction(1), 0, 0, 0, 0, 0, lane_slice_ns=((0, 80),))
    lane = decide(state, measured)[0].lanes[0]
    assert [lane.expected_ns(slices) for slices in (1, 2, 3, 4)] == [32, 48, 64, 80]


def test_a_slow_lane_leaves_a_full_job_to_a_fast_one() -> None:
    """The fast lane would finish the first slice alone at 2 s; what it takes at once stays together."""
    fast = LaneOffer("fast", 4 * SECOND, 4, (2 * SECOND, 3 * SECOND, 3 * SECOND, 4 * SECOND))
    slow = LaneOffer("slow", 3 * SECOND)
    _, actions = decide(opened([fast, slow], dispatch="earliest_finish"), Tick(0))
    assert sorted(handed(actions)) == [(0, Slice(0, 0, 0, 4)), (1, Slice(0, 0, 4, 1))]


# --- The SPEC ------------------------------------------------------------------------------------------------


MIXED: dict[str, Any] = {
    "steps": 4,
    "prompts": 4,
    "samples_per_prompt": 8,
    "slice": 1,
    "generators": [
        {"name": "h100", "count": 2, "seconds": {1: 1.0, 4: 2.2}},
        {"name": "a6000", "count": 2, "seconds": {1: 2.5, 4: 9.4}},
    ],
    "trainer": {"seconds_per_sample": 0.2, "commit": 0.5},
    "publish": 0.5,
    "policy": {"dispatch": "earliest_finish"},
}


def makespan(unit: int, h100: int | None, a6000: int | None) -> float:
    pools = [{**pool, "slice": own} for pool, own in zip(MIXED["generators"], (h100, a6000), strict=True)]
    return simulate(parse_model(Spec, {**MIXED, "slice": unit, "generators": pools})).answer.makespan


def test_a_larger_slice_pays_on_the_pool_that_gains_by_it() -> None:
    """The figures of docs/scheduling.md."""
    alike = [makespan(unit, None, None) for unit in (1, 2, 4)]
    assert [*alike, makespan(1, 4, None)] == [57.9, 48.3, 45.1, 41.9]


def test_the_virtual_cluster_takes_the_pools_time_for_the_size_taken() -> None:
    spec = parse_model(
        Spec, {**MIXED, "steps": 1, "prompts": 1, "generators": [{"seconds": {1: 1, 4: 2}, "slice": 4}]}
    )
    assert simulate(spec).answer.makespan == pytest.approx(2 * 2 + 8 * 0.2 + 0.5)


@pytest.mark.parametrize(
    ("slice_", "own", "choices"), [(2, 3, "2, 4, 8"), ("auto", 3, "1, 2, 4, 8"), (2, 8, "4"), (2, 0, "0")]
)
def test_an_impossible_slice_of_a_pool_is_refused(slice_: Any, own: int, choices: str) -> None:
    pools = [{**MIXED["generators"][0], "slice": own}, MIXED["generators"][1]]
    with pytest.raises(ConfigError, match=rf"generators\[0\]\.slice: .*{choices}"):
        parse_model(Spec, {**MIXED, "slice": slice_, "generators": pools})


def test_an_automatic_slice_divides_the_slices_of_all_pools() -> None:
    pools = [{**MIXED["generators"][0], "slice": 2}, {**MIXED["generators"][1], "slice": 4}]
    run = simulate(parse_model(Spec, {**MIXED, "slice": "auto", "generators": pools}))
    assert run.spec.slice in (1, 2)
