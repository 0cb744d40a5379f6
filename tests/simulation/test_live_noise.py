"""The scheduler under a runtime whose times stray and whose lanes come and go: promises hold, and runs end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import spec_contents

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import (
    Action,
    Committed,
    Event,
    Generate,
    Help,
    HelpersReady,
    LaneOffer,
    Publish,
    Published,
    Return,
    SamplesScored,
    Score,
    ScoreFailed,
    SliceDone,
    SliceFailed,
    Tick,
    Train,
    Trained,
    Wait,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import SchedulerState, decide
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.scheduling.help.help_rules import WAIT_ALWAYS, play
from digenrl.scheduling.invariants import Auditor
from digenrl.scheduling.state import Free
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import Faults, VirtualCluster
from digenrl.telemetry.recorder import Recorder
from simulation.noisy_cluster import NoisyCluster

SECOND = 1_000_000_000
HELPS = ("none", "greedy", "search", "auto")
DISPATCHES = ("eager", "earliest_finish")
SPECS = spec_contents(helps=HELPS, dispatches=DISPATCHES, most_samples=24)


@settings(max_examples=250)
@given(SPECS, st.integers(1, 4), st.integers(0, 2), st.sampled_from([1, 200]), st.integers(0, 10**6))
def test_every_promise_holds_and_every_run_ends_however_times_stray(
    content: dict[str, Any], batch: int, scorers: int, budget: int, seed: int
) -> None:
    content["reward"] |= {"batch": batch, "lanes": scorers}
    opening = initial_scheduler_state(parse_model(Spec, content), budget)
    auditor, recorder = Auditor(opening), Recorder(opening)
    final = drive(opening, NoisyCluster(opening, seed), (auditor, recorder))
    assert final.finished
    assert auditor.trained_samples == opening.terms.steps * opening.terms.samples_per_step
    assert all(span.start_ns <= span.end_ns for span in recorder.trace().spans)


def opening(lanes: tuple[float, ...] = (1, 1), budget: int = 100, **changes: Any) -> SchedulerState:
    """Lanes of these slice times, a trainer with one helper lane, groups of two samples in slices of one."""
    content = {
        "steps": 3,
        "prompts": 1,
        "samples_per_prompt": 2,
        "slice": 1,
        "generators": [{"seconds": {1: seconds}} for seconds in lanes],
        "trainer": {"seconds_per_sample": 0.1, "helper": {"seconds": {1: 1}, "switch_in": 0.1, "switch_out": 0.1}},
        **changes,
    }
    return initial_scheduler_state(parse_model(Spec, content), budget)


class Told:
    """A scheduler that is told what happened, audited; it remembers the last orders."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.orders: tuple[Action, ...] = ()
        self._auditor = Auditor(state)

    def tell(self, *events: Event) -> Told:
        """All events of an instant; their orders together are the last ones."""
        self.orders = ()
        for event in events:
            self.state, actions = decide(self.state, event)
            self._auditor.observe(event, actions, self.state)
            self.orders += actions
        return self

    def ordered(self, kind: type[Action]) -> list[Any]:
        """The last orders of one kind."""
        return [order for order in self.orders if isinstance(order, kind)]


def test_a_slice_of_a_group_in_quarantine_may_outlive_its_steps_commit() -> None:
    """Lane 1 makes a sample of group 0 for so long that the group's replacement is made and committed first."""
    for end in (SliceDone, SliceFailed, WorkerLost):
        told = Told(opening(lanes=(1, 100)))
        quick, slow = (order.lease for order in told.tell(Tick(0)).ordered(Generate))
        told.tell(SliceDone(1, quick))
        told.tell(ScoreFailed(1, quick.slice, -1, "no number"))
        for at in (2, 3):
            (again,) = told.tell(Tick(at)).ordered(Generate)
            told.tell(SliceDone(at, again.lease), SamplesScored(at, again.lease.slice, -1))
        (train,) = told.tell(Tick(4)).ordered(Train)
        told.tell(Trained(5, train.slices), Tick(5), Committed(5, 0), Published(5, 1, (0, 1)), Tick(5))
        assert told.state.committed == 1
        assert told.state.lanes[1].lease == slow
        assert forecast_from_state(told.state, 6).wait(), "the forecast must not trip over it either"
        late = {SliceDone: SliceDone(7, slow), SliceFailed: SliceFailed(7, slow, "ended")}
        told.tell(late.get(end, WorkerLost(7, 1)), Tick(7))
        assert told.ordered(Score) == []
        assert (told.state.lanes[1].lease is None) == (end is WorkerLost)


def test_a_replacement_group_in_quarantine_does_not_confuse_the_look_ahead() -> None:
    """Its number is one that no group of a later step has; its slice ends when a later step is under way."""
    told = Told(opening(lanes=(1, 5), steps=9))
    quick, slow = (order.lease for order in told.tell(Tick(0)).ordered(Generate))
    failed = ScoreFailed(1, quick.slice, -1, "no number")
    told.tell(SliceDone(1, quick), failed, SliceFailed(1, slow, "no luck"), Tick(1))
    quick, slow = (order.lease for order in told.ordered(Generate))
    told.tell(SliceDone(2, quick), ScoreFailed(2, quick.slice, -1, "no number"), Tick(2))
    assert told.state.lanes[1].lease == slow and slow.slice.group == 1
    assert told.state.current.groups[1].retired
    future = forecast_from_state(told.state, 3)
    play(future, until_step=9, planned=(), rule=WAIT_ALWAYS)
    assert future.committed == 9


@pytest.mark.parametrize("stream", ["group", "sample"])
def test_a_score_of_a_group_in_quarantine_is_not_counted_on(stream: str) -> None:
    told = Told(opening(reward={"lanes": 2, "seconds": 1}, policy={"stream": stream}))
    leases = [order.lease for order in told.tell(Tick(0)).ordered(Generate)]
    told.tell(*(SliceDone(SECOND, lease) for lease in leases))
    told.tell(ScoreFailed(SECOND + 1, leases[0].slice, 0, "no number"), Tick(SECOND + 1))
    future = forecast_from_state(told.state, SECOND + 1)
    assert future.wait()
    assert future.now == 3 * SECOND + 1, "the replacement is made in one second, and scored in another"


def test_a_trainer_that_waits_for_generators_that_are_lost_helps_after_all() -> None:
    """During publishing generators hold no lease, so nothing is handed out again when they are gone."""
    start = opening(lanes=(0.1, 0.1), publish=0.2, policy={"help": "search"})
    told, cluster = Told(start), VirtualCluster(start)
    while told.state.committed == 0:
        told.tell(cluster.next_event())
        for order in told.orders:
            cluster.submit(order)
    assert told.tell(Tick(cluster.now_ns)).ordered(Wait)
    told.tell(WorkerLost(cluster.now_ns + 1, 0), WorkerLost(cluster.now_ns + 1, 1), Tick(cluster.now_ns + 1))
    assert told.ordered(Help)


@pytest.mark.parametrize(("help_policy", "stale"), [("search", 0), ("auto", 0), ("auto", 1)])
def test_a_trainer_alone_goes_on_however_small_its_budget(help_policy: str, stale: float) -> None:
    """Scores that are still to come use the budget up before anything but waiting for ever was looked at."""
    start = opening(
        lanes=(0.1, 0.1),
        budget=1,
        samples_per_prompt=8,
        reward={"lanes": 1, "seconds": 1},
        policy={"help": help_policy, "stale_fraction": stale},
    )
    gone = Faults(events=(WorkerLost(SECOND // 4, 0), WorkerLost(SECOND // 4, 1)))
    assert drive(start, VirtualCluster(start, gone), (Auditor(start),)).finished


def test_a_trainer_whose_helper_lanes_are_lost_on_the_way_in_goes_back_to_training() -> None:
    told = Told(opening(lanes=(9, 9), prompts=2, policy={"help": "greedy"}))
    assert told.tell(Tick(0)).ordered(Help)
    told.tell(WorkerLost(1, 2), HelpersReady(2), Tick(2))
    assert told.ordered(Return)


def test_a_version_for_nobody_is_not_published() -> None:
    start = opening(policy={"help": "auto"})
    gone = Faults(events=(WorkerLost(1, 0), WorkerLost(1, 1)))
    recorder = Recorder(start)

    class NoPublications:
        def observe(self, event: Event, actions: tuple[Action, ...], state: SchedulerState) -> None:
            assert not any(isinstance(action, Publish) for action in actions)
            assert state.publishing == ()

    drive(start, VirtualCluster(start, gone), (recorder, NoPublications()))


@pytest.mark.parametrize("scorers", [0, 1])
def test_a_late_or_doubled_score_is_dropped(scorers: int) -> None:
    told = Told(opening(reward={"lanes": scorers, "seconds": 1}))
    first = told.tell(Tick(0)).ordered(Generate)[0].lease
    (score,) = told.tell(SliceDone(1, first)).ordered(Score)
    told.tell(SamplesScored(2, score.slice, score.scorer))
    before = told.state
    told.tell(SamplesScored(3, score.slice, score.scorer), ScoreFailed(3, score.slice, score.scorer, "late"))
    assert (told.state, told.orders) == (before, ())


def test_slow_lanes_do_not_leave_slices_to_a_quick_lane_that_has_no_weights_yet() -> None:
    start = opening(lanes=(10,), policy={"dispatch": "earliest_finish"})
    told = Told(start).tell(WorkerJoined(0, LaneOffer("quick", SECOND)))
    assert told.ordered(Publish) == [Publish(0, (1,))]
    assert [order.lease.lane for order in told.tell(Tick(0)).ordered(Generate)] == [0]


def test_lanes_of_one_speed_do_not_wait_for_the_one_whose_weights_arrive_last() -> None:
    start = opening(lanes=(1, 1, 1), prompts=4, publish=1, policy={"dispatch": "earliest_finish"})
    told, cluster = Told(start), VirtualCluster(start)
    while told.state.committed == 0:
        told.tell(cluster.next_event())
        for order in told.orders:
            cluster.submit(order)
    at_ns = cluster.now_ns + SECOND
    told.tell(Published(at_ns, 1, (1,)), Published(at_ns, 1, (2,)), Tick(at_ns))
    assert [order.lease.lane for order in told.ordered(Generate)] == [1, 2]
    assert isinstance(told.state.trainer, Free)


def test_a_lane_with_newer_weights_goes_before_its_equals() -> None:
    state = opening(lanes=(1, 1), policy={"dispatch": "earliest_finish"})
    state = replace(state, lanes=(state.lanes[0], replace(state.lanes[1], version=1)))
    _, actions = decide(state, Tick(0))
    assert [action.lease.lane for action in actions if isinstance(action, Generate)] == [1, 0]


def test_a_lane_that_waits_for_weights_which_others_have_is_forecast_to_be_free_when_they_are_due() -> None:
    start = opening(lanes=(1, 1), prompts=4, publish=5)
    told, cluster = Told(start), VirtualCluster(start)
    while told.state.committed == 0:
        told.tell(cluster.next_event())
        for order in told.orders:
            cluster.submit(order)
    committed_ns = cluster.now_ns
    told.tell(Published(committed_ns + SECOND, 1, (0,)), Tick(committed_ns + SECOND))
    future = forecast_from_state(told.state, committed_ns + SECOND)
    assert future.idle == [0]
    free_ns = [committed_ns + 2 * SECOND, committed_ns + 5 * SECOND]
    assert sorted(end for end, *_ in future.running) == free_ns


def test_lanes_that_have_just_joined_are_forecast_to_work_with_the_newest_version() -> None:
    told = Told(opening(lanes=(1,), publish=2)).tell(WorkerLost(0, 0), WorkerJoined(0, LaneOffer("new", SECOND)))
    future = forecast_from_state(told.state, 0)
    assert future.wait(), "they will finish what is left"
    assert future.now == 2 * SECOND + 2 * SECOND


def test_publications_that_were_overtaken_are_forgotten() -> None:
    """One lane never answers; the scheduler does not keep a list of what it missed."""
    start = opening(lanes=(1, 1), publish=0.5, policy={"help": "greedy"}, steps=30)
    told, cluster = Told(start), VirtualCluster(start)
    while not told.state.finished:
        event = cluster.next_event()
        if isinstance(event, Published):
            event = Published(event.at_ns, event.version, (0,))
        told.tell(event)
        for order in told.orders:
            cluster.submit(order)
        assert len(told.state.publishing) <= 2
