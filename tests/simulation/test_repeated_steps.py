"""A run with stale samples that is killed and resumed repeats the versions of all samples in its journal."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from digenrl.chaos.faults import Fault
from digenrl.chaos.promises import Contribution, TrainedUpdate, ViolationError, check_repeated
from digenrl.chaos.run import run_world
from digenrl.chaos.worlds import World, draw_world
from digenrl.records import (
    Generate,
    Generated,
    LaneOffer,
    Publish,
    Published,
    Slice,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import Costs, RecordedStep, SchedulerState, Terms, decide, initial_state
from digenrl.scheduling.recorded_versions import VersionRecord

SEEDS = range(20)
KILLS_PER_WORLD = 6


def worlds_with_stale_samples() -> list[World]:
    drawn = (draw_world(seed, kinds=("driver_kill",)) for seed in SEEDS)
    return [world for world in drawn if world.recipe.techniques.tcss > 0 and world.recipe.steps > 1]


def test_a_killed_driver_changes_no_version_that_is_in_the_journal() -> None:
    """`run_world` compares what is in the final weights with the journals of the drivers that were killed."""
    repeated = 0
    for world in worlds_with_stale_samples():
        decisions = run_world(world, ()).decisions
        for nth in range(1, KILLS_PER_WORLD):
            kill = Fault(0, "driver_kill", amount=nth * decisions // KILLS_PER_WORLD)
            repeated += run_world(world, (kill,)).repeated
    assert repeated > 150


def test_two_kills_in_a_row_change_no_version_either() -> None:
    for world in worlds_with_stale_samples()[::2]:
        decisions = run_world(world, ()).decisions
        kills = [Fault(0, "driver_kill", amount=part * decisions // 10) for part in (6, 9)]
        assert run_world(world, kills).drivers == 3


# --- The record ------------------------------------------------------------------------------------------------


def stale_job(job_id: int, piece: Slice) -> Generate:
    return Generate(job_id, 0, piece, lane=0, version=piece.step - 1)


def test_a_slice_counts_by_the_version_that_made_it() -> None:
    record, first, second = VersionRecord(), stale_job(0, Slice(1, 0, 0, 2)), stale_job(1, Slice(1, 0, 2, 2))
    record.observe(Tick(0), (first, second))
    assert record.steps(1) == (RecordedStep(1, ((0, 0b1111),)),)
    record.observe(Generated(1, first, version=0), ())
    record.observe(Generated(1, second, version=1), ())
    assert record.steps(1) == (RecordedStep(1, ((0, 0b0011),)),)


def test_a_late_result_of_a_slice_that_was_issued_again_does_not_count() -> None:
    record, lost = VersionRecord(), stale_job(0, Slice(1, 0, 0, 2))
    record.observe(Tick(0), (lost,))
    record.observe(WorkerLost(1, 0), ())
    record.observe(Tick(1), (replace(lost, id=1, version=1),))
    record.observe(Generated(2, lost, version=0), ())
    assert all(not step.stale for step in record.steps(1))


def test_wrong_versions_are_noticed() -> None:
    record = RecordedStep(1, ((0, 0b11),), closed=True)
    fresh, old = (
        tuple(Contribution(place=0, group=0, index=index, version=version, reward=0.5) for index in range(3))
        for version in (1, 0)
    )
    with pytest.raises(ViolationError, match="generated anew"):
        check_repeated([record], (TrainedUpdate(1, 0, fresh),))
    with pytest.raises(ViolationError, match="instead of"):
        check_repeated([record], (TrainedUpdate(1, 0, old),))
    check_repeated([record], (TrainedUpdate(1, 0, (*old[:2], fresh[2])),))
    check_repeated([record], ())  # another group took the place of this one


# --- The scheduler ---------------------------------------------------------------------------------------------


def resumed(stale: tuple[tuple[int, int], ...], lanes: int = 2) -> SchedulerState:
    """A run resumed after its first step, whose lanes serve the version before."""
    terms = Terms(steps=3, prompts=2, samples_per_prompt=2, slice_size=1, stale_budget=2)
    offers = [LaneOffer(f"lane-{index}", 5) for index in range(lanes)]
    record = RecordedStep(1, stale, closed=True)
    return initial_state(terms, Costs(Fraction(1)), offers, committed=1, served=0, recorded=(record,))


def test_recorded_slices_come_first_and_the_new_version_waits_for_them() -> None:
    state, actions = decide(resumed(((1, 0b11),)), Tick(0))
    jobs = [action for action in actions if isinstance(action, Generate)]
    assert [(job.slice.group, job.slice.first, job.version) for job in jobs] == [(1, 0, 0), (1, 1, 0)]
    state, _ = decide(state, Generated(5, jobs[0], version=0))
    state, actions = decide(state, Tick(5))
    assert not actions, "one of them is still being generated"
    state, _ = decide(state, Generated(6, jobs[1], version=0))
    _, actions = decide(state, Tick(6))
    assert [action.version for action in actions if isinstance(action, Publish)] == [1]


def test_without_a_lane_that_serves_the_old_version_recorded_slices_are_generated_with_the_new_one() -> None:
    state = resumed(((1, 0b01),), lanes=1)
    state, _ = decide(state, WorkerLost(0, 0))
    assert decide(state, Tick(0))[1] == ()
    state, (publish,) = decide(state, WorkerJoined(1, LaneOffer("new", 5)))
    assert isinstance(publish, Publish)
    state, _ = decide(state, Published(2, publish, (1,)))
    _, actions = decide(state, Tick(2))
    assert [(action.slice.group, action.version) for action in actions if isinstance(action, Generate)] == [(1, 1)]


def test_a_record_beyond_the_stale_budget_is_cut() -> None:
    state = resumed(((0, 0b11), (1, 0b11)))
    assert [piece.group for piece in state.current.reissue] == [0, 0]
