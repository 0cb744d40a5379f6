"""Measured costs replace expected ones and do not affect jobs under way."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import CostsMeasured, Event, Generate, Generated, SwitchRole, Tick
from digenrl.scheduling import Costs, SchedulerState, decide
from digenrl.scheduling.invariants import Auditor
from digenrl.scheduling.state import BubblePlan, PlannedBubble
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import Faults, VirtualCluster

SECOND = 1_000_000_000
PLAN = BubblePlan(step=0, bubbles=(PlannedBubble(5 * SECOND, 1),), exact=True, length=1)


def opening(**policy: Any) -> SchedulerState:
    content = {
        "steps": 2,
        "prompts": 2,
        "samples_per_prompt": 4,
        "slice": 2,
        "generators": [{"name": "fast", "count": 2, "seconds": {2: 4}}, {"name": "slow", "seconds": {2: 6}}],
        "reward": {"lanes": 1, "seconds": 0.1},
        "trainer": {
            "seconds_per_sample": 1,
            "commit": 0.5,
            "helper": {"lanes": 1, "seconds": {2: 4}, "switch_in": 0.2, "switch_out": 0.2},
        },
        "publish": 1,
        "policy": policy,
    }
    return initial_scheduler_state(parse_model(Spec, content), search_budget=500)


def measured(state: SchedulerState, *slices: tuple[int, int], at_ns: int = 0, **changed: Any) -> CostsMeasured:
    """The expected costs, except for what is named."""
    names = Costs.__dataclass_fields__.keys() & CostsMeasured.__dataclass_fields__.keys()
    fields = {name: getattr(state.costs, name) for name in names}
    return CostsMeasured(at_ns, **{**fields, **changed}, lane_slice_ns=slices)


def absorbed(state: SchedulerState, event: Event) -> SchedulerState:
    after, actions = decide(state, event)
    assert actions == ()
    return after


def test_all_costs_are_replaced() -> None:
    event = CostsMeasured(0, Fraction(7, 3), 1, 2, 3, 4, 5, evaluate_ns=6, save_ns=7)
    expected = Costs(Fraction(7, 3), 1, 2, 3, 4, 5, evaluate_ns=6, save_ns=7)
    assert absorbed(opening(), event).costs == expected


def test_idle_lanes_stay_ordered_fastest_first_then_by_index() -> None:
    state = opening()
    assert state.idle == (0, 1, 2)
    state = absorbed(state, measured(state, (0, 6 * SECOND), (1, 5 * SECOND), (2, 5 * SECOND)))
    assert state.idle == (1, 2, 0)
    _, actions = decide(state, Tick(1))
    assert [action.lane for action in actions if isinstance(action, Generate)] == [1, 2, 0]


def test_lanes_that_are_not_named_keep_their_time() -> None:
    state = opening()
    after = absorbed(state, measured(state, (2, 5 * SECOND)))
    assert [lane.slice_ns for lane in after.lanes[:3]] == [4 * SECOND, 4 * SECOND, 5 * SECOND]


def test_jobs_under_way_continue() -> None:
    state, actions = decide(opening(), Tick(0))
    job = next(action for action in actions if isinstance(action, Generate))
    state = absorbed(state, measured(state, (job.lane, 9 * SECOND), at_ns=1))
    assert state.lanes[job.lane].job == job
    after, scoring = decide(state, Generated(2, job, version=0))
    assert scoring and after.lanes[job.lane].job is None


def test_a_measured_time_of_zero_counts_as_one_nanosecond() -> None:
    state = opening(dispatch="earliest_finish")
    after = absorbed(state, measured(state, (0, 0)))
    assert after.lanes[0].slice_ns == 1
    decide(after, Tick(0))


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"train_sample_ns": Fraction(11, 10) * SECOND}, True),
        ({"train_sample_ns": Fraction(6, 5) * SECOND}, False),
        ({"commit_ns": 0}, False),
        ({"commit_ns": SECOND // 2 + 4 * SECOND // 10}, True),
        ({"publish_ns": 2 * SECOND}, False),
        ({"switch_in_ns": SECOND}, False),
        ({"switch_out_ns": SECOND // 10}, True),
        ({"score_ns": SECOND // 5}, True),
        ({"score_ns": 2 * SECOND}, False),
    ],
    ids=str,
)
def test_a_plan_survives_a_change_of_a_tenth_of_a_cost_or_of_a_slice(change: dict[str, Any], kept: bool) -> None:
    state = replace(opening(help="search"), bubble_plan=PLAN)
    assert absorbed(state, measured(state, **change)).bubble_plan == (PLAN if kept else None)


@pytest.mark.parametrize(
    ("slice_ns", "kept"), [(4_400_000_000, True), (4_500_000_000, False), (3 * SECOND, False)]
)
def test_a_plan_survives_a_change_of_a_tenth_of_a_lanes_time(slice_ns: int, kept: bool) -> None:
    state = replace(opening(help="search"), bubble_plan=PLAN)
    assert absorbed(state, measured(state, (1, slice_ns))).bubble_plan == (PLAN if kept else None)


def test_measurements_of_a_lost_lane_do_not_end_a_plan() -> None:
    state = replace(opening(help="search"), bubble_plan=PLAN)
    present = tuple(lane.index for lane in state.lanes if lane.index != 2)
    state = replace(state, present=present, idle=(0, 1))
    assert absorbed(state, measured(state, (2, 60 * SECOND))).bubble_plan == PLAN


def test_measurements_change_decisions() -> None:
    """Help does not start once it is known to be expensive."""
    state = opening(help="search")
    state = absorbed(state, measured(state, train_sample_ns=Fraction(SECOND, 10)))
    _, actions = decide(state, Tick(0))
    assert any(isinstance(action, SwitchRole) for action in actions)
    expensive = absorbed(state, measured(state, switch_in_ns=60 * SECOND))
    _, actions = decide(expensive, Tick(0))
    assert not any(isinstance(action, SwitchRole) for action in actions)


@pytest.mark.parametrize("help_rule", ["none", "greedy", "search", "auto"])
def test_measurements_that_equal_the_expected_costs_change_no_schedule(help_rule: str) -> None:
    state = opening(help=help_rule, stale_fraction=0.5)
    nothing_new = tuple(measured(state, at_ns=at * SECOND // 7) for at in range(1, 200, 3))
    ends = []
    for events in ((), nothing_new):
        cluster = VirtualCluster(state, Faults(events=events))
        drive(state, cluster, (Auditor(state),))
        ends.append(cluster.now_ns)
    assert ends[0] == ends[1]


def test_lanes_get_their_pools_own_time_of_publishing() -> None:
    state = absorbed(opening(), measured(opening(), lane_publish_ns=((2, 9 * SECOND),)))
    assert [state.costs.publication_ns(lane.publish_ns) for lane in state.lanes[:3]] == [
        SECOND,
        SECOND,
        9 * SECOND,
    ]


def test_a_plan_is_kept_only_if_no_lanes_publishing_changes_much() -> None:
    state = replace(opening(help="search"), bubble_plan=PLAN)
    kept = absorbed(state, measured(state, lane_publish_ns=((0, SECOND),)))
    dropped = absorbed(state, measured(state, lane_publish_ns=((0, 9 * SECOND),)))
    assert (kept.bubble_plan, dropped.bubble_plan) == (PLAN, None)
