"""Lost and joined lanes, failed slices and rewards: every promise holds after every event, and the run ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import spec_contents

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import RunGaveUpError, drive
from digenrl.records import Action, Generate, Generated, SampleId, Tick, WorkerLost
from digenrl.scheduling import decide
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import Faults, StalledError, VirtualCluster
from digenrl.telemetry.recorder import Recorder
from simulation.random_faults import TrainedSamples, faults_for

SECOND = 1_000_000_000
HELPS = ("none", "greedy", "search", "auto")


@settings(max_examples=70)
@given(st.data())
def test_every_promise_holds_after_every_event_however_lanes_come_and_go(data: st.DataObject) -> None:
    spec = parse_model(Spec, data.draw(spec_contents(helps=HELPS, dispatches=("eager", "earliest_finish"))))
    initial = initial_scheduler_state(spec, search_budget=200)
    cluster = VirtualCluster(initial, data.draw(faults_for(initial)))
    auditor, trained, recorder = Auditor(initial), TrainedSamples(), Recorder(initial)
    final = drive(initial, cluster, (auditor, trained, recorder))
    assert final.finished
    trained.check(initial)
    assert auditor.trained_samples == spec.steps * spec.prompts * spec.samples_per_prompt


@settings(max_examples=30)
@given(st.data())
def test_the_same_faults_give_the_same_trace(data: st.DataObject) -> None:
    spec = parse_model(Spec, data.draw(spec_contents(helps=HELPS)))
    initial = initial_scheduler_state(spec, search_budget=200)
    faults = data.draw(faults_for(initial))
    traces = []
    for _ in range(2):
        recorder = Recorder(initial)
        drive(initial, VirtualCluster(initial, faults), (recorder,))
        traces.append(recorder.trace())
    assert traces[0] == traces[1]


def small_spec(**policy: Any) -> Spec:
    content = {
        "steps": 2,
        "prompts": 2,
        "samples_per_prompt": 4,
        "slice": 2,
        "generators": [{"count": 2, "seconds": {2: 4}}],
        "trainer": {"seconds_per_sample": 1, "helper": {"lanes": 1, "seconds": {2: 4}}},
        "policy": policy,
    }
    return parse_model(Spec, content)


def test_a_late_result_of_a_lost_lane_is_dropped() -> None:
    initial = initial_scheduler_state(small_spec(), search_budget=100)
    state, actions = decide(initial, Tick(0))
    first = next(action for action in actions if isinstance(action, Generate))
    state, _ = decide(state, WorkerLost(1, first.lane))
    assert decide(state, Generated(2, first, version=0)) == (state, ())


def test_a_doubled_result_is_not_mistaken_for_the_lanes_current_job() -> None:
    initial = initial_scheduler_state(small_spec(), search_budget=100)
    state, actions = decide(initial, Tick(0))
    first = next(action for action in actions if isinstance(action, Generate))
    state, _ = decide(state, Generated(4 * SECOND, first, version=0))
    state, _ = decide(state, Tick(4 * SECOND))
    assert state.lanes[first.lane].job not in (None, first)
    assert decide(state, Generated(5 * SECOND, first, version=0)) == (state, ())


def test_a_lost_stale_slice_returns_its_share_of_the_budget() -> None:
    initial = initial_scheduler_state(small_spec(stale_fraction=0.25), search_budget=100)
    cluster = VirtualCluster(initial)
    state, stale = initial, None
    while stale is None:
        state, actions = decide(state, cluster.next_event())
        for action in actions:
            cluster.submit(action)
            if isinstance(action, Generate) and action.stale:
                stale = action
    assert state.steps[1].stale_samples == 2
    after, _ = decide(state, WorkerLost(cluster.now_ns + 1, stale.lane))
    assert after.steps[1].stale_samples == 0


def test_a_stale_slice_that_was_made_with_newer_weights_returns_its_share_of_the_budget() -> None:
    initial = initial_scheduler_state(small_spec(stale_fraction=0.25), search_budget=100)
    cluster, state = VirtualCluster(initial), initial
    while state.steps[1].stale_samples == 0:
        state, actions = decide(state, cluster.next_event())
        for action in actions:
            cluster.submit(action)
    stale = next(lane.job for lane in state.lanes if isinstance(lane.job, Generate) and lane.job.stale)
    after, _ = decide(state, Generated(cluster.now_ns, stale, version=1))
    assert after.steps[1].stale_samples == 0
    after, _ = decide(state, Generated(cluster.now_ns, stale, version=0))
    assert after.steps[1].stale_samples == 2


def test_a_lost_slice_is_reissued_first_and_under_a_new_id() -> None:
    initial = initial_scheduler_state(small_spec(), search_budget=100)
    state, actions = decide(initial, Tick(0))
    lost, kept = (action for action in actions if isinstance(action, Generate))
    state, _ = decide(state, WorkerLost(1, lost.lane))
    state, _ = decide(state, Generated(4 * SECOND, kept, version=0))
    _, actions = decide(state, Tick(4 * SECOND))
    again = next(action for action in actions if isinstance(action, Generate))
    assert again.slice == lost.slice
    assert again.id > max(lost.id, kept.id)


def test_a_failed_reward_quarantines_its_whole_group_and_a_fresh_one_replaces_it() -> None:
    initial = initial_scheduler_state(small_spec(), search_budget=100)
    trained = TrainedSamples()
    faults = Faults(failing_samples=frozenset({SampleId(step=0, group=1, index=3)}))
    drive(initial, VirtualCluster(initial, faults), (Auditor(initial), trained))
    assert trained.quarantined_groups == [(0, 1)]
    assert {sample.group for sample in trained.committed if sample.step == 0} == {0, 2}


def test_a_run_in_which_every_reward_fails_gives_up_with_the_reason() -> None:
    initial = initial_scheduler_state(small_spec(), search_budget=100)
    every = frozenset(SampleId(0, group, index) for group in range(100) for index in range(4))
    with pytest.raises(RunGaveUpError, match=r"step 0.*simulated failure"):
        drive(initial, VirtualCluster(initial, Faults(failing_samples=every)))


def test_the_trainer_generates_alone_if_all_generators_are_lost() -> None:
    initial = initial_scheduler_state(small_spec(help="auto"), search_budget=100)
    lost = tuple(WorkerLost(1 * SECOND, lane) for lane in (0, 1))
    final = drive(initial, VirtualCluster(initial, Faults(events=lost)), (Auditor(initial),))
    assert final.finished


def test_a_simulation_without_any_lane_left_stops_with_an_error() -> None:
    initial = initial_scheduler_state(small_spec(help="none"), search_budget=100)
    lost = tuple(WorkerLost(1 * SECOND, lane) for lane in (0, 1))
    with pytest.raises(StalledError, match="lane"):
        drive(initial, VirtualCluster(initial, Faults(events=lost)))


def test_decide_is_pure() -> None:
    state = initial_scheduler_state(small_spec(help="auto", stale_fraction=0.5), search_budget=100)
    cluster = VirtualCluster(state)
    while not state.finished:
        event = cluster.next_event()
        before = repr(state)
        after, actions = decide(state, event)
        assert decide(state, event) == (after, actions)
        assert repr(state) == before
        state = after
        for action in actions:
            assert isinstance(action, Action)
            cluster.submit(action)
