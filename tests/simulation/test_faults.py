"""Lanes lost and joined, slices and rewards that fail: every promise holds after every event, and the run ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import spec_contents

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import RunGaveUpError, drive
from digenrl.records import (
    Action,
    Event,
    Generate,
    LaneOffer,
    Quarantine,
    SampleId,
    SliceDone,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import SchedulerState, decide
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import Faults, StalledError, VirtualCluster
from digenrl.telemetry.recorder import Recorder

SECOND = 1_000_000_000
HELPS = ("none", "greedy", "search", "auto")


@st.composite
def faults_for(draw: st.DrawFn, spec: Spec) -> Faults:
    """Lanes go and come at random times; a quick lane joins at the end, so that every fault heals."""
    lanes = sum(pool.count for pool in spec.generators)
    moments = st.integers(0, 20 * SECOND)
    lost = draw(st.lists(st.tuples(moments, st.integers(0, lanes)), max_size=6))
    joined = draw(st.lists(moments, max_size=3))
    joins = [WorkerJoined(at, LaneOffer(f"new-{at}", SECOND)) for at in (*sorted(joined), 21 * SECOND)]
    samples = st.builds(SampleId, st.integers(0, spec.steps - 1), st.integers(0, spec.prompts), st.integers(0, 7))
    return Faults(
        events=tuple(WorkerLost(at, lane) for at, lane in lost if lane < lanes) + tuple(joins),
        failing_epochs=frozenset(draw(st.sets(st.integers(0, 40), max_size=6))),
        failing_samples=frozenset(draw(st.sets(samples, max_size=3))),
    )


class SampleStore:
    """Counts what came out, independently of the scheduler and of the auditor."""

    def __init__(self) -> None:
        self.trained: list[SampleId] = []
        self.quarantined_groups: list[tuple[int, int]] = []

    def observe(self, event: Event, actions: Any, state: SchedulerState) -> None:
        for piece in getattr(event, "slices", ()):
            self.trained += piece.samples()
        self.quarantined_groups += [(a.step, a.group) for a in actions if isinstance(a, Quarantine)]


@settings(max_examples=250)
@given(st.data())
def test_every_promise_holds_after_every_event_however_lanes_come_and_go(data: st.DataObject) -> None:
    spec = parse_model(Spec, data.draw(spec_contents(helps=HELPS, dispatches=("eager", "earliest_finish"))))
    opening = initial_scheduler_state(spec, search_budget=200)
    cluster = VirtualCluster(opening, data.draw(faults_for(spec)))
    auditor, ledger, recorder = Auditor(opening), SampleStore(), Recorder(opening)
    final = drive(opening, cluster, (auditor, ledger, recorder))

    assert final.finished
    retired = set(ledger.quarantined_groups)
    kept = [sample for sample in ledger.trained if (sample.step, sample.group) not in retired]
    assert len(kept) == len(set(kept)) == spec.steps * spec.prompts * spec.samples_per_prompt
    assert auditor.trained_samples == len(kept)


@settings(max_examples=60)
@given(st.data())
def test_the_same_faults_give_the_same_trace(data: st.DataObject) -> None:
    spec = parse_model(Spec, data.draw(spec_contents(helps=HELPS)))
    faults = data.draw(faults_for(spec))
    traces = []
    for _ in range(2):
        opening = initial_scheduler_state(spec, search_budget=200)
        recorder = Recorder(opening)
        drive(opening, VirtualCluster(opening, faults), (recorder,))
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


def test_a_late_answer_from_a_lost_lane_is_fenced_off() -> None:
    opening = initial_scheduler_state(small_spec(), search_budget=100)
    state, actions = decide(opening, Tick(0))
    first = next(action.lease for action in actions if isinstance(action, Generate))
    state, _ = decide(state, WorkerLost(1, first.lane))
    after, actions = decide(state, SliceDone(2, first))
    assert after == state
    assert actions == ()


def test_a_doubled_answer_is_not_taken_for_the_slice_the_lane_makes_now() -> None:
    opening = initial_scheduler_state(small_spec(), search_budget=100)
    state, actions = decide(opening, Tick(0))
    first = next(action.lease for action in actions if isinstance(action, Generate))
    state, _ = decide(state, SliceDone(4 * SECOND, first))
    state, _ = decide(state, Tick(4 * SECOND))
    assert state.lanes[first.lane].lease not in (None, first)
    after, actions = decide(state, SliceDone(5 * SECOND, first))
    assert (after, actions) == (state, ())


def test_a_lost_stale_slice_gives_its_share_back() -> None:
    opening = initial_scheduler_state(small_spec(stale_fraction=0.25), search_budget=100)
    cluster = VirtualCluster(opening)
    state, stale = opening, None
    while stale is None:
        state, actions = decide(state, cluster.next_event())
        for action in actions:
            cluster.submit(action)
            if isinstance(action, Generate) and action.lease.stale:
                stale = action.lease
    assert state.steps[1].stale_samples == 2
    after, _ = decide(state, WorkerLost(cluster.now_ns + 1, stale.lane))
    assert after.steps[1].stale_samples == 0


def test_a_lost_slice_is_handed_out_again_first_and_under_a_new_epoch() -> None:
    opening = initial_scheduler_state(small_spec(), search_budget=100)
    state, actions = decide(opening, Tick(0))
    lost, kept = (action.lease for action in actions if isinstance(action, Generate))
    state, _ = decide(state, WorkerLost(1, lost.lane))
    state, _ = decide(state, SliceDone(4 * SECOND, kept))
    _, actions = decide(state, Tick(4 * SECOND))
    again = next(action.lease for action in actions if isinstance(action, Generate))
    assert again.slice == lost.slice
    assert again.epoch > max(lost.epoch, kept.epoch)


def test_a_failed_reward_takes_its_whole_group_into_quarantine_and_a_fresh_one_replaces_it() -> None:
    opening = initial_scheduler_state(small_spec(), search_budget=100)
    ledger = SampleStore()
    faults = Faults(failing_samples=frozenset({SampleId(step=0, group=1, index=3)}))
    drive(opening, VirtualCluster(opening, faults), (Auditor(opening), ledger))
    assert ledger.quarantined_groups == [(0, 1)]
    groups_of_step_0 = {sample.group for sample in ledger.trained if sample.step == 0}
    assert groups_of_step_0 == {0, 2}


def test_a_run_in_which_every_reward_fails_gives_up_with_the_reason() -> None:
    opening = initial_scheduler_state(small_spec(), search_budget=100)
    every = frozenset(SampleId(0, group, index) for group in range(100) for index in range(4))
    with pytest.raises(RunGaveUpError, match="groups of step 0 failed: simulated failure"):
        drive(opening, VirtualCluster(opening, Faults(failing_samples=every)))


def test_the_trainer_helps_out_when_all_generators_are_gone() -> None:
    opening = initial_scheduler_state(small_spec(help="auto"), search_budget=100)
    gone = tuple(WorkerLost(1 * SECOND, lane) for lane in (0, 1))
    final = drive(opening, VirtualCluster(opening, Faults(events=gone)), (Auditor(opening),))
    assert final.finished


def test_a_run_without_any_lane_left_says_so_and_does_not_hang() -> None:
    opening = initial_scheduler_state(small_spec(help="none"), search_budget=100)
    gone = tuple(WorkerLost(1 * SECOND, lane) for lane in (0, 1))
    with pytest.raises(StalledError, match="no lane is left"):
        drive(opening, VirtualCluster(opening, Faults(events=gone)))


def test_decide_changes_neither_its_state_nor_its_mind() -> None:
    state = initial_scheduler_state(small_spec(help="auto", stale_fraction=0.5), search_budget=100)
    cluster = VirtualCluster(state)
    while not state.finished:
        event = cluster.next_event()
        before = repr(state)
        after, actions = decide(state, event)
        again, actions_again = decide(state, event)
        assert repr(state) == before
        assert (after, actions) == (again, actions_again)
        state = after
        for action in actions:
            assert isinstance(action, Action)
            cluster.submit(action)
