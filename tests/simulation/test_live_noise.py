"""The scheduler under random times and faults: promises hold, and runs end."""

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
    Generated,
    Job,
    JobFailed,
    LaneOffer,
    Publish,
    Published,
    RoleSwitched,
    Score,
    Scored,
    SwitchRole,
    Tick,
    Train,
    Trained,
    Wait,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import SchedulerState, decide
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.scheduling.help.help_rules import WAIT_ALWAYS, simulate_help
from digenrl.scheduling.invariants import Auditor
from digenrl.scheduling.state import Free
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import Faults, VirtualCluster
from digenrl.telemetry.recorder import Recorder
from simulation.audited_scheduler import AuditedScheduler, generated
from simulation.noisy_cluster import NoisyCluster

SECOND = 1_000_000_000
HELPS = ("none", "greedy", "search", "auto")
DISPATCHES = ("eager", "earliest_finish")
SPECS = spec_contents(helps=HELPS, dispatches=DISPATCHES, most_samples=24)


@settings(max_examples=70)
@given(SPECS, st.integers(1, 4), st.integers(0, 2), st.sampled_from([1, 200]), st.integers(0, 10**6))
def test_every_promise_holds_and_every_run_ends_with_random_times_and_faults(
    content: dict[str, Any], batch: int, scorers: int, budget: int, seed: int
) -> None:
    content["reward"] |= {"batch": batch, "lanes": scorers}
    initial = initial_scheduler_state(parse_model(Spec, content), budget)
    auditor, recorder = Auditor(initial), Recorder(initial)
    final = drive(initial, NoisyCluster(initial, seed), (auditor, recorder))
    assert final.finished
    assert auditor.trained_samples == initial.terms.steps * initial.terms.samples_per_step
    assert all(span.start_ns <= span.end_ns for span in recorder.trace().spans)


def initial(lanes: tuple[float, ...] = (1, 1), budget: int = 100, **changes: Any) -> SchedulerState:
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


def test_a_slice_of_a_quarantined_group_may_outlive_its_steps_commit() -> None:
    """Lane 1 generates a sample of group 0 until after the group's replacement is committed."""
    for end in (Generated, JobFailed, WorkerLost):
        scheduler = AuditedScheduler(initial(lanes=(1, 100)))
        fast, slow = scheduler.feed(Tick(0)).issued(Generate)
        scheduler.feed(generated(1, fast, "no number"))
        for at in (2, 3):
            (again,) = scheduler.feed(Tick(at)).issued(Generate)
            scheduler.feed(generated(at, again))
        (train,) = scheduler.feed(Tick(4)).issued(Train)
        (commit,) = scheduler.feed(Trained(5, train), Tick(5)).issued(Job)
        (publish,) = scheduler.feed(Committed(5, commit)).issued(Publish)
        scheduler.feed(Published(5, publish, (0, 1)), Tick(5))
        assert scheduler.state.committed == 1
        assert scheduler.state.lanes[1].job == slow
        assert forecast_from_state(scheduler.state, 6).wait(), "the forecast must handle it too"
        late: dict[Any, Event] = {Generated: generated(7, slow), JobFailed: JobFailed(7, slow, "ended")}
        scheduler.feed(late.get(end, WorkerLost(7, 1)), Tick(7))
        assert scheduler.issued(Score) == []
        assert (scheduler.state.lanes[1].job is None) == (end is WorkerLost)


def test_a_quarantined_replacement_group_does_not_confuse_the_forecast() -> None:
    """No group of a later step has its number, and its slice ends when a later step is under way."""
    scheduler = AuditedScheduler(initial(lanes=(1, 5), steps=9))
    fast, slow = scheduler.feed(Tick(0)).issued(Generate)
    scheduler.feed(generated(1, fast, "no number"), JobFailed(1, slow, "no luck"), Tick(1))
    fast, slow = scheduler.issued(Generate)
    scheduler.feed(generated(2, fast, "no number"), Tick(2))
    assert scheduler.state.lanes[1].job == slow and slow.slice.group == 1
    assert scheduler.state.current.groups[1].retired
    future = forecast_from_state(scheduler.state, 3)
    simulate_help(future, until_step=9, planned=(), rule=WAIT_ALWAYS)
    assert future.committed == 9


@pytest.mark.parametrize("stream", ["group", "sample"])
def test_the_forecast_ignores_scores_of_a_quarantined_group(stream: str) -> None:
    scheduler = AuditedScheduler(initial(reward={"lanes": 2, "seconds": 1}, policy={"stream": stream}))
    jobs = scheduler.feed(Tick(0)).issued(Generate)
    score, _ = scheduler.feed(*(generated(SECOND, job) for job in jobs)).issued(Score)
    scheduler.feed(JobFailed(SECOND + 1, score, "no number"), Tick(SECOND + 1))
    future = forecast_from_state(scheduler.state, SECOND + 1)
    assert future.wait()
    assert future.now == 3 * SECOND + 1, "the replacement is generated in one second and scored in another"


def test_a_trainer_that_waits_for_lost_generators_decides_to_help() -> None:
    """Lanes that wait for a publication hold no job, so nothing is reissued when they are lost."""
    start = initial(lanes=(0.1, 0.1), publish=0.2, policy={"help": "search"})
    scheduler, cluster = AuditedScheduler(start), VirtualCluster(start)
    scheduler.run_to_commit(cluster)
    assert scheduler.feed(Tick(cluster.now_ns)).issued(Wait)
    at_ns = cluster.now_ns + 1
    scheduler.feed(WorkerLost(at_ns, 0), WorkerLost(at_ns, 1), Tick(at_ns))
    assert [job.role for job in scheduler.issued(SwitchRole)] == ["generate"]


@pytest.mark.parametrize(("help_rule", "stale"), [("search", 0), ("auto", 0), ("auto", 1)])
def test_a_trainer_alone_continues_however_small_its_search_budget(help_rule: str, stale: float) -> None:
    """Pending scores use up the budget before anything but waiting for ever was simulated."""
    start = initial(
        lanes=(0.1, 0.1),
        budget=1,
        samples_per_prompt=8,
        reward={"lanes": 1, "seconds": 1},
        policy={"help": help_rule, "stale_fraction": stale},
    )
    lost = Faults(events=(WorkerLost(SECOND // 4, 0), WorkerLost(SECOND // 4, 1)))
    assert drive(start, VirtualCluster(start, lost), (Auditor(start),)).finished


def test_a_trainer_that_loses_its_helper_lanes_while_switching_returns_to_training() -> None:
    scheduler = AuditedScheduler(initial(lanes=(9, 9), prompts=2, policy={"help": "greedy"}))
    (switch,) = scheduler.feed(Tick(0)).issued(SwitchRole)
    scheduler.feed(WorkerLost(1, 2), RoleSwitched(2, switch), Tick(2))
    assert [job.role for job in scheduler.issued(SwitchRole)] == ["train"]


def test_a_version_is_not_published_without_lanes() -> None:
    start = initial(policy={"help": "auto"})
    lost = Faults(events=(WorkerLost(1, 0), WorkerLost(1, 1)))
    recorder = Recorder(start)

    class NoPublications:
        def observe(self, event: Event, actions: tuple[Action, ...], state: SchedulerState) -> None:
            assert not any(isinstance(action, Publish) for action in actions)
            assert state.publishing == ()

    drive(start, VirtualCluster(start, lost), (recorder, NoPublications()))


def test_a_late_or_doubled_score_is_dropped() -> None:
    scheduler = AuditedScheduler(initial(reward={"lanes": 1, "seconds": 1}))
    first = scheduler.feed(Tick(0)).issued(Generate)[0]
    (score,) = scheduler.feed(generated(1, first)).issued(Score)
    before = scheduler.feed(Scored(2, score)).state
    scheduler.feed(Scored(3, score), JobFailed(3, score, "late"))
    assert (scheduler.state, scheduler.actions) == (before, ())


def test_slow_lanes_do_not_leave_slices_to_a_fast_lane_without_weights() -> None:
    start = initial(lanes=(10,), policy={"dispatch": "earliest_finish"})
    scheduler = AuditedScheduler(start).feed(WorkerJoined(0, LaneOffer("fast", SECOND)))
    assert [(job.version, job.lanes) for job in scheduler.issued(Publish)] == [(0, (1,))]
    assert [job.lane for job in scheduler.feed(Tick(0)).issued(Generate)] == [0]


def test_equal_lanes_do_not_wait_for_the_one_whose_weights_arrive_last() -> None:
    start = initial(lanes=(1, 1, 1), prompts=4, publish=1, policy={"dispatch": "earliest_finish"})
    scheduler, cluster = AuditedScheduler(start), VirtualCluster(start)
    (publish,) = scheduler.run_to_commit(cluster).issued(Publish)
    at_ns = cluster.now_ns + SECOND
    scheduler.feed(Published(at_ns, publish, (1,)), Published(at_ns, publish, (2,)), Tick(at_ns))
    assert [job.lane for job in scheduler.issued(Generate)] == [1, 2]
    assert isinstance(scheduler.state.trainer, Free)


def test_a_lane_with_newer_weights_goes_before_its_equals() -> None:
    state = initial(lanes=(1, 1), policy={"dispatch": "earliest_finish"})
    state = replace(state, lanes=(state.lanes[0], replace(state.lanes[1], version=1)))
    _, actions = decide(state, Tick(0))
    assert [action.lane for action in actions if isinstance(action, Generate)] == [1, 0]


def test_a_lane_without_the_newest_weights_is_forecast_to_be_free_when_they_are_due() -> None:
    start = initial(lanes=(1, 1), prompts=4, publish=5)
    scheduler, cluster = AuditedScheduler(start), VirtualCluster(start)
    (publish,) = scheduler.run_to_commit(cluster).issued(Publish)
    committed_ns = cluster.now_ns
    scheduler.feed(Published(committed_ns + SECOND, publish, (0,)), Tick(committed_ns + SECOND))
    future = forecast_from_state(scheduler.state, committed_ns + SECOND)
    assert future.idle == [0]
    free_ns = [committed_ns + 2 * SECOND, committed_ns + 5 * SECOND]
    assert sorted(end for end, *_ in future.running) == free_ns


def test_lanes_that_have_just_joined_are_forecast_to_work_with_the_newest_version() -> None:
    scheduler = AuditedScheduler(initial(lanes=(1,), publish=2))
    scheduler.feed(WorkerLost(0, 0), WorkerJoined(0, LaneOffer("new", SECOND)))
    future = forecast_from_state(scheduler.state, 0)
    assert future.wait(), "they will finish what is left"
    assert future.now == 2 * SECOND + 2 * SECOND


def test_a_lane_that_evaluates_is_forecast_to_be_busy_until_its_chunk_ends() -> None:
    start = initial(lanes=(1, 1), evaluation={"every": 1, "chunks": 1, "chunk": 7})
    scheduler = AuditedScheduler(start).feed(Tick(0))
    future = forecast_from_state(scheduler.state, at_ns=0)
    assert sorted(end for end, *_ in future.running) == [SECOND, 7 * SECOND]
    assert future.wait() and future.now == 2 * SECOND


def test_superseded_publications_are_forgotten() -> None:
    """One lane never answers. The scheduler keeps no list of what it missed."""
    start = initial(lanes=(1, 1), publish=0.5, policy={"help": "greedy"}, steps=30)
    scheduler, cluster = AuditedScheduler(start), VirtualCluster(start)
    while not scheduler.state.finished:
        event = cluster.next_event()
        if isinstance(event, Published):
            event = replace(event, lanes=(0,))
        scheduler.feed(event)
        for action in scheduler.actions:
            cluster.submit(action)
        assert len(scheduler.state.publishing) <= 2
