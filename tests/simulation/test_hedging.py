"""Slices that take far longer than expected are given to a second lane, and the first result counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from digenrl.chaos.faults import Fault
from digenrl.chaos.run import run_world
from digenrl.chaos.worlds import draw_world
from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import Action, Event, Generate, JobFailed, Tick, Wake, WorkerLost
from digenrl.scheduling import SchedulerState
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from simulation.audited_scheduler import AuditedScheduler, generated

SECOND = 1_000_000_000


def initial(hedge_after: float = 3, seconds: Sequence[float] = (2, 2), **changes: Any) -> SchedulerState:
    """One step of two slices on two lanes, each of 2 s."""
    content = {
        "steps": 1,
        "prompts": 2,
        "samples_per_prompt": 2,
        "slice": 2,
        "generators": [{"seconds": {2: each}} for each in seconds],
        "trainer": {"seconds_per_sample": 1},
        **changes,
    }
    state = initial_scheduler_state(parse_model(Spec, content), search_budget=1)
    return replace(state, terms=replace(state.terms, hedge_after=hedge_after))


def straggling(state: SchedulerState) -> tuple[AuditedScheduler, Generate, Generate]:
    """A scheduler whose second slice is overdue, with the job and its copy."""
    scheduler = AuditedScheduler(state)
    fast, slow = scheduler.feed(Tick(0)).issued(Generate)
    assert scheduler.feed(generated(2 * SECOND, fast), Tick(2 * SECOND)).issued(Wake) == [Wake(6 * SECOND)]
    (copy,) = scheduler.feed(Tick(6 * SECOND)).issued(Generate)
    return scheduler, slow, copy


def test_an_idle_lane_takes_a_copy_of_an_overdue_slice_and_nothing_without_hedging() -> None:
    _, slow, copy = straggling(initial())
    assert (copy.slice, copy.hedges, copy.lane) == (slow.slice, slow.id, 0)
    scheduler = AuditedScheduler(initial(hedge_after=0))
    fast, _ = scheduler.feed(Tick(0)).issued(Generate)
    assert scheduler.feed(generated(2 * SECOND, fast), Tick(2 * SECOND), Tick(60 * SECOND)).actions[1:] == ()


def test_the_first_result_counts_and_the_slower_one_is_dropped() -> None:
    for copy_wins in (True, False):
        scheduler, slow, copy = straggling(initial())
        first, second = (copy, slow) if copy_wins else (slow, copy)
        scheduler.feed(generated(7 * SECOND, first))
        assert scheduler.state.current.groups[slow.slice.group].scored == 0b11
        before = scheduler.state.current
        scheduler.feed(generated(8 * SECOND, second))
        assert scheduler.state.current == before
        assert scheduler.state.idle == (0, 1) and not scheduler.state.void_jobs


def test_a_lost_or_failed_copy_leaves_the_slice_to_the_other_one() -> None:
    for loses_copy in (True, False):
        scheduler, slow, copy = straggling(initial())
        lost, kept = (copy, slow) if loses_copy else (slow, copy)
        scheduler.feed(WorkerLost(7 * SECOND, lost.lane))
        assert scheduler.state.current.reissue == ()
        scheduler.feed(JobFailed(8 * SECOND, kept, "no memory"))
        assert scheduler.state.current.reissue == (slow.slice,), "now nobody generates it"


def test_a_copy_does_not_outlive_the_quarantine_of_its_group() -> None:
    scheduler, slow, copy = straggling(initial())
    scheduler.feed(generated(7 * SECOND, copy, "no number"), generated(8 * SECOND, slow), Tick(8 * SECOND))
    assert all(job.slice.group == 2 for job in scheduler.issued(Generate)), "the replacement"


def test_a_slow_lane_takes_a_copy_only_when_that_is_predicted_to_pay() -> None:
    """It needs 20 s; the overdue job is expected to take as long as it has taken so far."""
    scheduler = AuditedScheduler(initial(seconds=(20, 2, 2), prompts=3))
    fast, slow, other = scheduler.feed(Tick(0)).issued(Generate)
    assert other.lane == 0
    scheduler.feed(WorkerLost(1, fast.lane), generated(2 * SECOND, other), Tick(2 * SECOND))
    scheduler.feed(generated(3 * SECOND, scheduler.issued(Generate)[0]), Tick(3 * SECOND))
    assert scheduler.feed(Tick(6 * SECOND)).issued(Generate) == []
    assert scheduler.issued(Wake) == [Wake(20 * SECOND)]
    assert [job.hedges for job in scheduler.feed(Tick(20 * SECOND)).issued(Generate)] == [slow.id]


def test_a_forecast_counts_a_slice_with_a_copy_once() -> None:
    scheduler, *_ = straggling(initial())
    future = forecast_from_state(scheduler.state, 6 * SECOND)
    assert future.wait() and future.done <= 2


def test_hedging_shortens_runs_in_which_a_generator_stalls() -> None:
    total_s: dict[float, float] = {}
    for seed in (7, 10, 13, 23):
        world = draw_world(seed)
        assert len(world.workers.generators) > 1
        stalls = (Fault(0, "stall", "generator-0"),)
        for hedge_after in (0.0, 3.0):
            lanes = world.recipe.lanes.model_copy(update={"hedge_after": hedge_after})
            recipe = world.recipe.model_copy(update={"lanes": lanes})
            run_s = run_world(replace(world, recipe=recipe), stalls).virtual_s
            total_s[hedge_after] = total_s.get(hedge_after, 0) + run_s
    assert total_s[3.0] < total_s[0.0]


def test_hedging_changes_nothing_if_no_slice_is_overdue() -> None:
    events: dict[float, list[Event]] = {}

    class Log:
        def __init__(self, key: float) -> None:
            self.key = key

        def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
            if not isinstance(event, Tick):
                events.setdefault(self.key, []).append(event)

    for hedge_after in (0, 3):
        state = initial(hedge_after, steps=3, policy={"stale_fraction": 0.5})
        drive(state, VirtualCluster(state), (Log(hedge_after),))
    assert events[0] == events[3]
