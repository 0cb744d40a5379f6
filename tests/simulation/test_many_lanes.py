"""Runs with hundreds of lanes: the work of one decision per lane does not grow with the number of lanes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from digenrl.records import LaneOffer, Tick, WorkerJoined, WorkerLost
from digenrl.scheduling import Costs, SchedulerState, SharedWorkRule, Terms, decide, initial_state
from digenrl.scheduling.state import ReadyUnit
from simulation.test_long_runs import CallCounter

SECOND = 1_000_000_000


def losing_lanes(state: SchedulerState, lanes: int) -> SchedulerState:
    """The state after that many lanes have joined and left."""
    for number in range(lanes):
        state, _ = decide(state, WorkerJoined(0, LaneOffer(f"lost-{number}", SECOND)))
        state, _ = decide(state, WorkerLost(0, len(state.lanes) - 1))
    return state


def calls_of_tick(state: SchedulerState) -> int:
    counter = CallCounter()
    counter.decided(state, Tick(0))
    return counter.calls


def shared_run(lanes: int, groups: int, rule: SharedWorkRule, speeds: int = 2) -> SchedulerState:
    """Lanes of several speeds that both generate and train; the last four are the trainer's."""
    terms = Terms(
        steps=3,
        prompts=groups,
        samples_per_prompt=16,
        slice_size=1,
        assist="both",
        shared_work=rule,
        job_samples=4,
    )
    offers = [
        LaneOffer(f"lane-{index}", SECOND + index % speeds * SECOND // 8, train_sample_ns=Fraction(SECOND))
        for index in range(lanes)
    ]
    return initial_state(terms, Costs(Fraction(SECOND), 0), offers[:-4], offers[-4:])


@pytest.mark.parametrize(
    "rule",
    [SharedWorkRule(), SharedWorkRule(strict=False), SharedWorkRule(pieces=((1,),) * 400)],
    ids=["strict", "not strict", "pieces"],
)
def test_idle_lanes_that_share_work_do_not_each_look_at_all_others(rule: SharedWorkRule) -> None:
    few, many = (calls_of_tick(shared_run(lanes, groups=lanes, rule=rule)) for lanes in (40, 400))
    assert many <= 12 * few


def test_handing_out_training_does_not_compare_all_that_is_ready() -> None:
    calls = []
    for groups in (32, 320):
        state = shared_run(8, groups, SharedWorkRule())
        terms = replace(state.terms, updates=4, update_of_place=tuple(place % 4 for place in range(groups)))
        ready = tuple(ReadyUnit(0, group, first, 4) for group in range(groups) for first in range(0, 16, 4))
        step = replace(state.current, ready=ready, cursor=terms.slices_per_step)
        calls.append(calls_of_tick(replace(state, terms=terms, steps=(step, *state.steps[1:]))))
    assert calls[1] <= 12 * calls[0]


@pytest.mark.parametrize(
    "changes", [{}, {"dispatch": "earliest_finish"}, {"hedge_after": 2.0}, {"assist": "both"}], ids=str
)
def test_lanes_that_were_lost_are_not_looked_at_in_a_tick(changes: dict[str, Any]) -> None:
    state = shared_run(8, 8, SharedWorkRule())
    terms = replace(state.terms, **{"assist": "trainer", "help": "auto", **changes})
    offers = [lane.offer for lane in state.lanes]
    state = initial_state(terms, state.costs, offers[:4], offers[4:])
    assert calls_of_tick(losing_lanes(state, 300)) == calls_of_tick(losing_lanes(state, 3))
