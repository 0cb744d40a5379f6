"""Lanes that take several slices at once: the same promises, the same samples, and quicker where it should be."""

from __future__ import annotations

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
    CostsMeasured,
    Event,
    Generate,
    LaneOffer,
    Quarantine,
    SampleId,
    ScoreFailed,
    Slice,
    SliceDone,
    SliceFailed,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import Costs, SchedulerState, Terms, decide, initial_state
from digenrl.scheduling.help.forecast_facts import NEVER
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.scheduling.help.help_rules import GREEDY, WAIT_ALWAYS, play
from digenrl.scheduling.help.lookahead import look_ahead
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.makespan import predict_makespan
from digenrl.simulation.simulator import simulate
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import Faults, VirtualCluster
from simulation.mixed_slices import mixed_contents
from simulation.noisy_cluster import NoisyCluster

SECOND = 1_000_000_000


class SampleStore:
    """Counts what came out, and how large leases were, independently of the scheduler and of the auditor."""

    def __init__(self, opening: SchedulerState) -> None:
        self._terms = opening.terms
        self._at_once = {lane.index: lane.slices_at_once for lane in opening.lanes}
        self.trained: list[SampleId] = []
        self.retired: set[tuple[int, int]] = set()

    def observe(self, event: Event, actions: Any, state: SchedulerState) -> None:
        if isinstance(event, WorkerJoined):
            self._at_once[len(self._at_once)] = event.offer.slices_at_once
        for piece in getattr(event, "slices", ()):
            self.trained += piece.samples()
        for action in actions:
            if isinstance(action, Quarantine):
                self.retired.add((action.step, action.group))
            elif isinstance(action, Generate):
                slices, rest = divmod(action.lease.slice.size, self._terms.slice_size)
                assert not rest and 1 <= slices <= self._at_once[action.lease.lane]

    def kept(self) -> list[SampleId]:
        return [sample for sample in self.trained if (sample.step, sample.group) not in self.retired]


@st.composite
def faults_for(draw: st.DrawFn, spec: Spec) -> Faults:
    """Lanes go and come, those that come take one to three slices at once; a quick one joins at the end."""
    lanes = sum(pool.count for pool in spec.generators)
    moments = st.integers(0, 20 * SECOND)
    lost = draw(st.lists(st.tuples(moments, st.integers(0, lanes - 1)), max_size=6))
    joined = draw(st.lists(st.tuples(moments, st.integers(1, 3)), max_size=3))
    joins = [
        WorkerJoined(at, LaneOffer(f"new-{at}", SECOND, at_once))
        for at, at_once in (*sorted(joined), (21 * SECOND, 2))
    ]
    samples = st.builds(SampleId, st.integers(0, spec.steps - 1), st.integers(0, spec.prompts), st.integers(0, 7))
    return Faults(
        events=(*(WorkerLost(at, lane) for at, lane in lost), *joins),
        failing_epochs=frozenset(draw(st.sets(st.integers(0, 40), max_size=6))),
        failing_samples=frozenset(draw(st.sets(samples, max_size=3))),
    )


def with_helpers_that_take(opening: SchedulerState, at_once: int) -> SchedulerState:
    """The same opening, with helpers whose offer says that they take so many slices at once."""
    offers = [lane.offer for lane in opening.lanes if not lane.helper]
    helpers = [LaneOffer(lane.name, lane.slice_ns, at_once) for lane in opening.lanes if lane.helper]
    return initial_state(opening.terms, opening.costs, offers, helpers)


@settings(max_examples=250)
@given(st.data())
def test_every_promise_holds_after_every_event_whatever_lanes_take_at_once(data: st.DataObject) -> None:
    spec = parse_model(Spec, data.draw(mixed_contents()))
    opening = initial_scheduler_state(spec, search_budget=data.draw(st.sampled_from([1, 200])))
    if data.draw(st.booleans()):
        opening = with_helpers_that_take(opening, 2)
    auditor, ledger = Auditor(opening), SampleStore(opening)
    final = drive(opening, VirtualCluster(opening, data.draw(faults_for(spec))), (auditor, ledger))
    assert final.finished
    kept = ledger.kept()
    assert len(kept) == len(set(kept)) == spec.steps * spec.prompts * spec.samples_per_prompt
    assert auditor.trained_samples == len(kept)


@settings(max_examples=150)
@given(mixed_contents(most_samples=24), st.integers(1, 4), st.integers(0, 2), st.integers(0, 10**6))
def test_every_run_ends_however_times_stray(content: dict[str, Any], batch: int, scorers: int, seed: int) -> None:
    content["reward"] |= {"batch": batch, "lanes": scorers}
    opening = initial_scheduler_state(parse_model(Spec, content), search_budget=100)
    auditor = Auditor(opening)
    assert drive(opening, NoisyCluster(opening, seed), (auditor, SampleStore(opening))).finished
    assert auditor.trained_samples == opening.terms.steps * opening.terms.samples_per_step


def test_lanes_that_leave_slices_to_each_other_do_not_leave_them_for_ever() -> None:
    """One lane makes a single slice soonest but takes two; two are made sooner by either of the others."""
    policy = {"order": "generation", "stream": "group", "help": "none", "dispatch": "earliest_finish"}
    pair = {"name": "pair", "count": 1, "seconds": {1: 0.9, 2: 2.8}, "slice": 2}
    single = {"name": "single", "count": 2, "seconds": {1: 1.2}}
    content = {"steps": 1, "prompts": 1, "samples_per_prompt": 2, "slice": 1, "generators": [pair, single]}
    content |= {"trainer": {"seconds_per_sample": 1.0}, "policy": policy}
    spec = parse_model(Spec, content)
    assert simulate(spec).answer.makespan == pytest.approx(1.2 + 2.0)
    assert predict_makespan(spec) == simulate(spec).answer.makespan


@settings(max_examples=100)
@given(mixed_contents(helps=("auto",), most_samples=32, colocated=False))
def test_looking_ahead_loses_neither_to_waiting_nor_to_greed_by_its_own_prediction(
    content: dict[str, Any],
) -> None:
    opening = initial_scheduler_state(parse_model(Spec, content), search_budget=1)
    bubble = forecast_from_state(opening, at_ns=0)
    bubble.start_generators()
    ends = []
    for plan, rule in ((look_ahead(bubble, 10**6), WAIT_ALWAYS), ((), WAIT_ALWAYS), ((), GREEDY)):
        future = bubble.fork()
        play(future, opening.terms.steps, plan, rule)
        ends.append(future.now)
    assert ends[0] <= min(ends[1:]) < NEVER


@settings(max_examples=150)
@given(mixed_contents(helps=("none", "greedy"), most_samples=32))
def test_a_forecast_plays_every_slice_and_comes_near_the_run(content: dict[str, Any]) -> None:
    spec = parse_model(Spec, content)
    assert predict_makespan(spec) == pytest.approx(simulate(spec).answer.makespan, rel=0.5)


@settings(max_examples=60)
@given(mixed_contents(helps=("none",), most_samples=32))
def test_one_pool_with_slices_of_its_own_is_forecast_exactly_in_generation_order(content: dict[str, Any]) -> None:
    del content["generators"][1:]
    content["policy"] |= {"order": "generation", "colocated": False, "stale_fraction": 0}
    spec = parse_model(Spec, content)
    assert predict_makespan(spec) == simulate(spec).answer.makespan


@settings(max_examples=100)
@given(spec_contents(helps=("none", "greedy", "search"), dispatches=("eager", "earliest_finish")))
def test_a_slice_of_its_own_that_every_pool_has_is_the_slice_of_the_spec(content: dict[str, Any]) -> None:
    """Where all lanes take a whole number of slices and nothing smaller is left, only the taking differs."""
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
    """Two groups of eight samples in slices of one, on these lanes."""
    fields = {"steps": 2, "prompts": 2, "samples_per_prompt": 8, "slice_size": 1, **terms}
    return initial_state(Terms(**fields), Costs(Fraction(SECOND)), offers)


def handed(actions: tuple[Action, ...]) -> list[tuple[int, Slice]]:
    return [(action.lease.lane, action.lease.slice) for action in actions if isinstance(action, Generate)]


BIG, SMALL = LaneOffer("big", 4 * SECOND, 4), LaneOffer("small", 5 * SECOND)


def test_a_lane_takes_neighbours_of_one_group_as_one_lease() -> None:
    state, actions = decide(opened([BIG, BIG, BIG, SMALL]), Tick(0))
    assert handed(actions) == [
        (0, Slice(0, 0, 0, 4)),
        (1, Slice(0, 0, 4, 4)),
        (2, Slice(0, 1, 0, 4)),
        (3, Slice(0, 1, 4, 1)),
    ]
    assert [lane.expected_ns(1) for lane in state.lanes] == [SECOND, SECOND, SECOND, 5 * SECOND]


def test_in_batch_order_a_lane_takes_the_group_on_and_nobody_takes_it_again() -> None:
    state, actions = decide(opened([BIG, SMALL, SMALL], order="batch"), Tick(0))
    assert handed(actions) == [(0, Slice(0, 0, 0, 4)), (1, Slice(0, 1, 0, 1)), (2, Slice(0, 1, 1, 1))]
    # Of the list 00 10 01 11 02 12 03 13 ... the slice 12 comes next, and 03 is taken ahead.
    assert (state.current.cursor, state.current.ahead) == (5, (6,))


def test_a_lane_takes_less_where_its_group_has_less_left() -> None:
    _, actions = decide(opened([BIG, BIG], samples_per_prompt=6, prompts=1), Tick(0))
    assert handed(actions) == [(0, Slice(0, 0, 0, 4)), (1, Slice(0, 0, 4, 2))]


def test_a_lane_takes_less_where_the_stale_budget_admits_less() -> None:
    state = opened([BIG, BIG, BIG], prompts=1, stale_budget=3)
    _, actions = decide(state, Tick(0))
    assert handed(actions) == [(0, Slice(0, 0, 0, 4)), (1, Slice(0, 0, 4, 4)), (2, Slice(1, 0, 0, 3))]


def test_a_lost_lease_is_handed_out_again_in_parts_to_lanes_of_other_sizes() -> None:
    state, _ = decide(opened([BIG, SMALL]), Tick(0))
    state, _ = decide(state, WorkerLost(1, 0))
    lease = state.lanes[1].lease
    assert lease is not None and lease.slice == Slice(0, 0, 4, 1)
    state, _ = decide(state, SliceDone(2, lease))
    for _ in range(2):
        state, _ = decide(state, WorkerJoined(2, LaneOffer("pair", SECOND, 2)))
    lanes = tuple(replace(lane, version=0) for lane in state.lanes)
    _, actions = decide(replace(state, lanes=lanes), Tick(2))
    assert handed(actions) == [(2, Slice(0, 0, 0, 2)), (3, Slice(0, 0, 2, 2)), (1, Slice(0, 0, 5, 1))]


def test_a_failed_lease_is_handed_out_again_whole_where_the_lane_is_as_large() -> None:
    state, actions = decide(opened([BIG]), Tick(0))
    lease = next(action.lease for action in actions if isinstance(action, Generate))
    state, _ = decide(state, SliceFailed(1, lease, "out of memory"))
    _, actions = decide(state, Tick(1))
    assert handed(actions) == [(0, lease.slice)]


def test_a_group_in_quarantine_is_not_taken_on() -> None:
    state, actions = decide(opened([BIG, SMALL]), Tick(0))
    leases = [action.lease for action in actions if isinstance(action, Generate)]
    state, _ = decide(state, SliceDone(1, leases[0]))
    state, _ = decide(state, ScoreFailed(1, leases[0].slice, -1, "no number"))
    _, actions = decide(state, Tick(1))
    assert handed(actions) == [(0, Slice(0, 2, 0, 4))]  # the group in its place stands in front


def test_a_measured_time_of_a_whole_take_scales_the_smaller_ones() -> None:
    state = opened([LaneOffer("big", 40, 4, (16, 24, 32, 40))])
    measured = CostsMeasured(0, Fraction(1), 0, 0, 0, 0, 0, lane_slice_ns=((0, 80),))
    lane = decide(state, measured)[0].lanes[0]
    assert [lane.expected_ns(slices) for slices in (1, 2, 3, 4)] == [32, 48, 64, 80]


def test_a_slow_lane_leaves_a_whole_take_to_a_big_quick_one() -> None:
    """The quick lane would have the first slice at 2 s; what it takes at once stays together."""
    quick = LaneOffer("quick", 4 * SECOND, 4, (2 * SECOND, 3 * SECOND, 3 * SECOND, 4 * SECOND))
    slow = LaneOffer("slow", 3 * SECOND)
    _, actions = decide(opened([quick, slow], dispatch="earliest_finish"), Tick(0))
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


def test_the_virtual_cluster_charges_the_pools_own_time_for_the_size_taken() -> None:
    spec = parse_model(
        Spec, {**MIXED, "steps": 1, "prompts": 1, "generators": [{"seconds": {1: 1, 4: 2}, "slice": 4}]}
    )
    assert simulate(spec).answer.makespan == pytest.approx(2 * 2 + 8 * 0.2 + 0.5)


@pytest.mark.parametrize(
    ("slice_", "own", "message"),
    [
        (
            2,
            3,
            "generators[0].slice: expected a number that is a multiple of slice = 2 and divides "
            "samples_per_prompt = 8, got 3; choose one of 2, 4, 8",
        ),
        (
            "auto",
            3,
            "generators[0].slice: expected a number that divides samples_per_prompt = 8, got 3; "
            "choose one of 1, 2, 4, 8",
        ),
        (
            2,
            8,
            "generators[0].slice: 8 is beyond its table of seconds, which ends at 4; "
            "add the time of a slice of 8, or choose 4 or less",
        ),
        (2, 0, "generators[0].slice: input should be greater than or equal to 1, got 0"),
    ],
)
def test_a_pools_own_slice_that_cannot_be_is_told(slice_: Any, own: int, message: str) -> None:
    pools = [{**MIXED["generators"][0], "slice": own}, MIXED["generators"][1]]
    with pytest.raises(ConfigError) as told:
        parse_model(Spec, {**MIXED, "slice": slice_, "generators": pools})
    assert str(told.value) == message


def test_with_the_slice_left_open_it_divides_every_pools_own() -> None:
    pools = [{**MIXED["generators"][0], "slice": 2}, {**MIXED["generators"][1], "slice": 4}]
    run = simulate(parse_model(Spec, {**MIXED, "slice": "auto", "generators": pools}))
    assert run.spec.slice in (1, 2)
