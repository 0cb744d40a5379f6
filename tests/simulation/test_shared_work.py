"""Lanes that both generate and train: single decisions with exact times, and what every schedule must satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_specs import both_contents

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import (
    Action,
    Calibrate,
    Calibrated,
    Commit,
    Committed,
    CostsMeasured,
    Evaluate,
    Event,
    Generate,
    Generated,
    LaneOffer,
    Publish,
    Published,
    SendGradients,
    Tick,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import Costs, SchedulerState, SharedWorkRule, Terms, decide, initial_state
from digenrl.simulation.answer import bound_seconds
from digenrl.simulation.both_directions import initial_shared_state
from digenrl.simulation.makespan import predict_makespan, with_best_slice
from digenrl.simulation.piece_search import improved
from digenrl.simulation.quotas import Margins, QuotaPlanner
from digenrl.simulation.shared_work import best_rules, commit_ends_ns
from digenrl.simulation.simulator import simulate
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.step_forecast import StepForecast
from digenrl.simulation.tables import title_of
from digenrl.simulation.virtual_cluster import VirtualCluster
from simulation.action_log import ActionLog

SECOND = 1_000_000_000
# Two equal cards: a sample takes 2 s to generate and 3 s to train, a change of role half a second.
TWO_CARDS: dict[str, Any] = {
    "steps": 1,
    "prompts": 2,
    "samples_per_prompt": 2,
    "slice": 1,
    "generators": [{"name": "card", "seconds": {1: 2}, "train_seconds": 3, "switch": 0.5}],
    "trainer": {
        "seconds_per_sample": 3,
        "helper": {"lanes": 1, "seconds": {1: 2}, "switch_in": 0.5, "switch_out": 0.5},
    },
    "policy": {"assist": "both", "help": "greedy"},
}
# Equal in training, but the first card generates four times as fast.
UNEQUAL_CARDS: dict[str, Any] = {
    **TWO_CARDS,
    "prompts": 4,
    "samples_per_prompt": 4,
    "generators": [{"name": "card", "seconds": {1: 1}, "train_seconds": 2}],
    "trainer": {"seconds_per_sample": 2, "helper": {"lanes": 1, "seconds": {1: 4}}},
}
SUITE_LIKE: dict[str, Any] = {
    "steps": 2,
    "prompts": 4,
    "samples_per_prompt": 6,
    "slice": "auto",
    "generators": [
        {"name": "fast", "count": 3, "seconds": {1: 2, 2: 3.6, 4: 6.4}, "train_seconds": 1.5, "switch": 0.1},
        {"name": "slow", "count": 2, "seconds": {1: 4, 4: 15}, "train_seconds": 3, "switch": 0.1},
    ],
    "trainer": {
        "seconds_per_sample": 0.8,
        "commit": 0.3,
        "reduce": 0.1,
        "helper": {"lanes": 2, "seconds": {1: 2.2, 4: 7}, "switch_in": 0.1, "switch_out": 0.1},
    },
    "publish": 0.2,
    "policy": {"assist": "both", "help": "search"},
}


def spec_of(content: dict[str, Any], **changes: Any) -> Spec:
    return parse_model(Spec, {**content, **changes})


def jobs_of(spec: Spec, rule: SharedWorkRule) -> tuple[int, list[tuple[float, Action]]]:
    """The makespan in nanoseconds, and every job with the second in which it was issued."""
    initial, log = initial_scheduler_state(spec, search_budget=0, shared_work=rule), ActionLog()
    cluster = VirtualCluster(initial)
    drive(initial, cluster, (log,))
    return cluster.now_ns, [(at_ns / SECOND, action) for at_ns, action in log.actions]


def schedule(jobs: list[tuple[float, Action]], lane: int) -> list[tuple[float, str, int, int]]:
    """What a lane does: (when, role, group, first sample)."""
    rows = []
    for at, job in jobs:
        if isinstance(job, Generate | Train) and job.lane == lane:
            role = "generate" if isinstance(job, Generate) else "train"
            rows.append((at, role, job.slice.group, job.slice.first))
    return rows


# --- Single decisions ------------------------------------------------------------------------------------------


def test_lanes_generate_first_and_pay_for_each_change_of_role() -> None:
    makespan_ns, jobs = jobs_of(spec_of(TWO_CARDS), SharedWorkRule())
    assert schedule(jobs, 0) == [
        (0, "generate", 0, 0),
        (2, "generate", 1, 0),
        (4, "train", 0, 0),  # until 7.5, with the switch
        (7.5, "train", 1, 0),
    ]
    assert schedule(jobs, 1) == [
        (0, "generate", 0, 1),  # the trainer's card begins in the role of training
        (2.5, "generate", 1, 1),
        (4.5, "train", 0, 1),
        (8, "train", 1, 1),
    ]
    assert makespan_ns == 11 * SECOND


def test_a_lane_trains_once_it_has_generated_its_pieces() -> None:
    makespan_ns, jobs = jobs_of(spec_of(TWO_CARDS), SharedWorkRule(pieces=((1, 1, 1), (1,))))
    assert schedule(jobs, 0) == [
        (0, "generate", 0, 0),
        (2, "generate", 1, 0),
        (4, "generate", 1, 1),
        (6, "train", 0, 1),
    ]
    assert schedule(jobs, 1) == [
        (0, "generate", 0, 1),
        (2.5, "train", 0, 0),
        (6, "train", 1, 0),
        (9, "train", 1, 1),
    ]
    assert makespan_ns == 12 * SECOND


def test_lanes_generate_beyond_their_pieces_if_no_lane_has_any_left() -> None:
    _, jobs = jobs_of(spec_of(TWO_CARDS), SharedWorkRule(pieces=((), ())))
    assert schedule(jobs, 0)[0] == (0, "generate", 0, 0)
    assert schedule(jobs, 1)[:2] == [(0, "generate", 0, 1), (2.5, "train", 0, 0)]
    _, jobs = jobs_of(spec_of(TWO_CARDS), SharedWorkRule(pieces=((1, 1, 1, 1), ())))
    assert [at for at, role, _, _ in schedule(jobs, 0) if role == "generate"] == [0, 2, 4, 6]
    assert schedule(jobs, 1)[0] == (4, "train", 0, 0), "it waits until a group is complete"


def test_nobody_waits_for_the_pieces_of_a_lane_that_is_late() -> None:
    spec = spec_of(TWO_CARDS)
    rule = SharedWorkRule(pieces=((1, 1, 1, 1), ()))
    state = initial_scheduler_state(spec, search_budget=0, shared_work=rule)
    state, (job,) = decide(state, Tick(0))
    assert isinstance(job, Generate) and job.lane == 0  # until 2
    for second, count in ((2.4, 0), (2.6, 1)):
        state, actions = decide(state, Tick(round(second * SECOND)))
        assert [action.lane for action in actions if isinstance(action, Generate)] == [1] * count


def test_a_slow_card_leaves_the_last_jobs_to_a_faster_one() -> None:
    slow = [{"name": "slow", "seconds": {1: 2}, "train_seconds": 30}]
    spec = spec_of(TWO_CARDS, generators=slow)
    makespan_ns, jobs = jobs_of(spec, SharedWorkRule())
    assert not [job for _, job in jobs if isinstance(job, Train) and job.lane == 0]
    assert makespan_ns == (4.5 + 0.5 + 4 * 3) * SECOND
    eager_ns, _ = jobs_of(spec, SharedWorkRule(leaves_to_faster=False))
    assert eager_ns == (4 + 30) * SECOND


def test_a_lane_without_train_seconds_only_generates() -> None:
    spec = spec_of(TWO_CARDS, generators=[{"name": "card", "count": 2, "seconds": {1: 2}}])
    _, jobs = jobs_of(spec, SharedWorkRule(pieces=((), (), ())))
    trains = [job.lane for _, job in jobs if isinstance(job, Train)]
    assert set(trains) == {2}


def test_generators_send_their_sums_and_the_trainer_keeps_its_own() -> None:
    _, jobs = jobs_of(spec_of(TWO_CARDS), SharedWorkRule())
    assert [(at, job.lane) for at, job in jobs if isinstance(job, SendGradients)] == [(10.5, 0)]


def test_a_group_is_trained_in_jobs_of_the_given_size() -> None:
    spec = spec_of(TWO_CARDS, trainer={**TWO_CARDS["trainer"], "job": 2, "reduce": 0.25, "commit": 0.5})
    makespan_ns, jobs = jobs_of(spec, SharedWorkRule())
    assert [job.slice.size for _, job in jobs if isinstance(job, Train)] == [2, 2]
    assert makespan_ns == (4.5 + 0.5 + 6 + 0.25 + 0.5) * SECOND


def test_pieces_that_are_finished_first_belong_to_the_first_groups_and_end_with_them() -> None:
    spec = spec_of(TWO_CARDS, prompts=2, samples_per_prompt=4)
    _, jobs = jobs_of(spec, SharedWorkRule(pieces=((4, 1), (3,)), slices_at_once=4))
    pieces = [(job.lane, job.slice.group, job.slice.size) for _, job in jobs if isinstance(job, Generate)]
    assert pieces == [(1, 0, 3), (0, 0, 1), (0, 1, 3), (0, 1, 1)]


def test_measured_training_times_replace_those_of_the_offer() -> None:
    initial = initial_scheduler_state(spec_of(TWO_CARDS), search_budget=0)
    measured = CostsMeasured(1, Fraction(1), 0, 0, 0, 0, 0, lane_train_ns=((0, Fraction(7)),), send_ns=5)
    state, _ = decide(initial, measured)
    assert [lane.train_sample_ns for lane in state.lanes] == [7, 3 * SECOND]
    assert state.costs.send_ns == 5


def test_a_lane_that_joins_trains_as_its_calibration_says() -> None:
    initial = initial_scheduler_state(spec_of(TWO_CARDS), search_budget=0)
    state, (publish, *_) = decide(initial, WorkerJoined(0, LaneOffer("late", 0)))
    assert isinstance(publish, Publish)
    state, _ = decide(state, Published(0, publish, publish.lanes))
    state, jobs = decide(state, Tick(0))
    (calibrate,) = (job for job in jobs if isinstance(job, Calibrate))
    offer = LaneOffer("late", 2 * SECOND, train_sample_ns=Fraction(3 * SECOND))
    state, _ = decide(state, Calibrated(1, calibrate, offer=offer))
    assert (state.lanes[2].slice_ns, state.lanes[2].train_sample_ns) == (2 * SECOND, 3 * SECOND)


def test_the_trainers_lane_samples_no_held_out_prompts_while_it_commits() -> None:
    """A generator is lost with its chunk. When the commit ends, the trainer has the next version."""
    terms = Terms(3, 1, 2, 2, assist="both", job_samples=2, evaluate_every=1, evaluation_chunks=1)
    terms = replace(terms, shared_work=SharedWorkRule(leaves_to_faster=False))
    generator, helper = (LaneOffer(name, SECOND, train_sample_ns=Fraction(SECOND)) for name in ("card", "trainer"))
    state = initial_state(terms, Costs(Fraction(SECOND)), [generator], [helper], evaluations=[0])
    state, (chunk, slice_) = decide(state, Tick(0))
    assert isinstance(chunk, Evaluate) and isinstance(slice_, Generate) and (chunk.lane, slice_.lane) == (0, 1)
    state, _ = decide(state, Generated(10, slice_, 0))
    state, (train,) = decide(state, Tick(10))
    assert isinstance(train, Train) and train.lane == 1
    state, _ = decide(state, Trained(20, train))
    state, (commit,) = decide(state, Tick(20))
    assert isinstance(commit, Commit)
    state, lost = decide(state, WorkerLost(30, 0))
    state, jobs = decide(state, Tick(30))
    assert not lost and not jobs


def test_a_generator_that_works_ahead_does_not_hold_up_the_commit() -> None:
    """It has its sums to send, so it takes a slice of the next step only when these are sent."""
    spec = spec_of(SUITE_LIKE, slice=1).with_rules(stale_fraction=1)
    _, jobs = jobs_of(spec, SharedWorkRule())
    holds: dict[int, bool] = {}
    for _, job in jobs:
        if isinstance(job, Train | SendGradients):
            holds[job.lane] = isinstance(job, Train)
        elif isinstance(job, Generate) and job.stale and job.lane < 5:
            assert not holds.get(job.lane)
    assert any(isinstance(job, Generate) and job.stale for _, job in jobs)


def test_the_trainer_ends_a_slice_of_the_next_step_late_if_it_may() -> None:
    trainer = TWO_CARDS["trainer"] | {"seconds_per_sample": 1.4}
    spec = spec_of(TWO_CARDS, steps=2, prompts=1, trainer=trainer).with_rules(stale_fraction=1)
    commits = {}
    for late_share in (0.4, 0.5):
        _, jobs = jobs_of(spec, SharedWorkRule(leaves_to_faster=False, late_share=late_share))
        stale = [at for at, job in jobs if isinstance(job, Generate) and job.stale and job.lane == 1]
        commits[late_share] = stale, next(at for at, job in jobs if isinstance(job, Commit))
    # From 4.4 s it waits for a Train job that ends at 6 s. A slice takes 2 s, after a switch of half a second.
    assert commits == {0.4: ([], 6), 0.5: ([4.4], 6.9)}


# --- Quotas and forecasts --------------------------------------------------------------------------------------


LISTS_OF_PIECES = st.lists(st.lists(st.integers(1, 6), max_size=4), max_size=8)  # by lane


class RolesAtCommits:
    """Whether every lane that can train is in that role at each commit, and when commits are."""

    def __init__(self) -> None:
        self.ends_ns: list[int] = []
        self.all_train = True

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        if isinstance(event, Committed):
            self.ends_ns.append(event.at_ns)
            self.all_train &= all(lane.role == "train" for lane in state.lanes if lane.train_sample_ns)


@settings(max_examples=20)
@given(both_contents(), LISTS_OF_PIECES, st.integers(1, 4), st.booleans(), st.booleans())
def test_the_forecast_of_a_step_is_close_to_what_the_scheduler_does(
    content: dict[str, Any], pieces: list[list[int]], at_once: int, leaves: bool, waits: bool
) -> None:
    content |= {"steps": 2, "reward": {}}
    spec = parse_model(Spec, content).with_rules(stale_fraction=0, order="generation")
    rule = SharedWorkRule(tuple(map(tuple, pieces)), at_once, leaves, waits)
    initial, commits = initial_scheduler_state(spec, search_budget=0, shared_work=rule), RolesAtCommits()
    drive(initial, VirtualCluster(initial), (commits,))
    assume(commits.all_train)
    first_ns, second_ns = commits.ends_ns
    assert StepForecast(initial).step_ns(rule) == pytest.approx(second_ns - first_ns, rel=0.25)


def test_quotas_let_cards_do_what_they_do_best_compared() -> None:
    spec = spec_of(UNEQUAL_CARDS)
    planner = QuotaPlanner.of_forecast(StepForecast(initial_scheduler_state(spec, search_budget=0)))
    least_ns = planner.least_ns(Margins())
    assert planner.quotas(least_ns, Margins()) == (16, 0)
    assert least_ns == pytest.approx(24 * SECOND, rel=1e-3)  # 16 s of generating, 32 s of training, two cards


@settings(max_examples=30)
@given(both_contents(), LISTS_OF_PIECES, st.integers(1, 4))
def test_random_changes_of_pieces_make_no_step_longer_and_leave_out_no_slice(
    content: dict[str, Any], pieces: list[list[int]], at_once: int
) -> None:
    spec = parse_model(Spec, content).with_rules(stale_fraction=0, order="generation")
    initial = initial_scheduler_state(spec, 0, SharedWorkRule(slices_at_once=at_once))
    forecast, lanes = StepForecast(initial), len(initial.lanes)
    planned = tuple(map(tuple, (pieces + [[1]] * lanes)[:lanes]))
    start = SharedWorkRule(planned, slices_at_once=at_once)
    found = improved(forecast, start, changes=30)
    assert forecast.step_ns(found) <= forecast.step_ns(start)
    assert sum(map(sum, found.pieces)) == initial.terms.slices_per_step
    assert all(piece <= at_once for of_lane in found.pieces for piece in of_lane)
    again = forecast.run(found)
    assert tuple(map(tuple, again.pieces)) == found.pieces, "it generates what it has planned"


def test_lanes_of_one_kind_may_generate_pieces_of_different_size() -> None:
    """Small pieces complete the first groups, for those who train early; large ones are faster."""
    fast = {1: 40, 2: 77.4, 4: 149.6}
    helper = {"lanes": 14, "seconds": {1: 50.9, 2: 95.4, 4: 179.2}}
    content = {
        "steps": 3,
        "prompts": 5,
        "samples_per_prompt": 14,
        "slice": "auto",
        "generators": [{"name": "card", "count": 16, "seconds": fast, "train_seconds": 44.5}],
        "trainer": {"seconds_per_sample": 4, "commit": 2, "helper": helper},
        "publish": 2,
        "policy": {"assist": "both", "help": "search"},
    }
    spec = parse_model(Spec, content)
    rule, *_ = best_rules(lambda rule: initial_shared_state(spec, rule), most_at_once=4, budget=100)
    from_quotas, *_ = best_rules(lambda rule: initial_shared_state(spec, rule), 4, budget=100, changes=0)
    assert len(set(rule.pieces[:16])) > 1
    ends_ns, ends_before_ns = (commit_ends_ns(initial_shared_state(spec, each)) for each in (rule, from_quotas))
    assert ends_ns[2] - ends_ns[1] < 0.99 * (ends_before_ns[2] - ends_before_ns[1])


# --- Schedules -------------------------------------------------------------------------------------------------


def alternatives(spec: Spec) -> dict[str, Spec]:
    return {
        "trainer": spec.with_rules(assist="trainer", help="auto"),
        "none": spec.with_rules(assist="none"),
        "colocated": spec.with_rules(colocated=True),
        "search": spec.with_rules(help="search"),
    }


@settings(max_examples=3)
@given(both_contents(helps=("auto",)))
def test_auto_loses_to_nothing_and_stays_above_its_bound(content: dict[str, Any]) -> None:
    spec = parse_model(Spec, content)
    answer = simulate(spec).answer
    assert answer.bound <= answer.makespan * (1 + 1e-9)
    for name, other in alternatives(spec).items():
        assert answer.makespan <= simulate(other).answer.makespan + 1e-9, name
    assert predict_makespan(spec, 200_000) == pytest.approx(answer.makespan)


def test_auto_compares_exact_makespans_if_pools_have_slices_of_their_own() -> None:
    """Forecasts are estimates then: that of colocated cards is 36 % too long."""
    content = {
        "steps": 2,
        "prompts": 2,
        "samples_per_prompt": 2,
        "slice": "auto",
        "generators": [
            {"name": "fast", "seconds": {1: 2.85, 2: 4.3}, "slice": 1},
            {
                "name": "slow",
                "count": 2,
                "seconds": {1: 4.32, 2: 6.3},
                "slice": 2,
                "train_seconds": 0.6,
                "switch": 0.2,
            },
        ],
        "trainer": {
            "seconds_per_sample": 1.2,
            "reduce": 0.3,
            "job": 2,
            "helper": {"lanes": 1, "seconds": {1: 3.72, 2: 6.45}, "switch_in": 0.5},
        },
        "policy": {"assist": "both", "help": "auto", "stale_fraction": 1},
    }
    spec = parse_model(Spec, content)
    colocated = simulate(alternatives(spec)["colocated"]).answer.makespan
    assert simulate(spec).answer.makespan <= colocated < simulate(spec.with_rules(help="search")).answer.makespan


def test_lanes_that_may_not_help_are_described_as_such() -> None:
    spec = spec_of(TWO_CARDS, policy={"assist": "both", "help": "none"})
    assert "help none" in title_of(spec) and "every card" not in title_of(spec)


@settings(max_examples=8)
@given(both_contents(helps=("greedy", "search")))
def test_every_schedule_stays_above_its_bound(content: dict[str, Any]) -> None:
    answer = simulate(parse_model(Spec, content)).answer
    assert answer.bound <= answer.makespan * (1 + 1e-9)
    assert -1e-9 <= answer.generator_idle <= 1
    assert -1e-9 <= answer.trainer_idle <= 1


def test_a_larger_stale_share_never_makes_a_run_longer() -> None:
    """Lanes that would work ahead at the wrong time use only a part of it."""
    slow, fast = {1: 14, 4: 14.5, 8: 29}, {1: 5, 4: 5, 8: 10}
    content = {
        "steps": 4,
        "prompts": 2,
        "samples_per_prompt": 8,
        "slice": "auto",
        "generators": [
            {"name": "slow", "count": 3, "seconds": slow, "train_seconds": 4, "switch": 1.4},
            {"name": "fast", "count": 2, "seconds": fast, "train_seconds": 1.2, "switch": 0.3},
        ],
        "trainer": {
            "seconds_per_sample": 4,
            "job": 4,
            "reduce": 2.564,
            "commit": 0.082,
            "helper": {"lanes": 1, "seconds": slow, "switch_in": 1.4, "switch_out": 1.4},
        },
        "publish": 1.3,
        "policy": {"assist": "both", "help": "search"},
    }
    spec = parse_model(Spec, content)
    makespans = [predict_makespan(spec.with_rules(stale_fraction=share)) for share in (0, 0.25, 0.5, 0.75, 1)]
    assert makespans == sorted(makespans, reverse=True) and makespans[-1] < 0.8 * makespans[0]


def test_the_bound_of_the_specification() -> None:
    """Equal cards: all of them are busy all the time, except for the trainer's during reduce and commit."""
    spec = spec_of(TWO_CARDS, steps=2, trainer={**TWO_CARDS["trainer"], "commit": 1, "reduce": 0.5})
    work = 2 * 4 * (2 + 3)
    assert bound_seconds(spec) == pytest.approx((work + 2 * 1.5) / 2, rel=1e-9)


def test_search_beats_greedy_where_cards_differ_and_tells_who_did_what() -> None:
    spec = spec_of(UNEQUAL_CARDS)
    greedy, searched = simulate(spec).answer, simulate(spec.with_rules(help="search")).answer
    assert searched.makespan < greedy.makespan
    assert searched.helped_samples < greedy.helped_samples
    assert searched.assisted_samples < greedy.assisted_samples


def test_idle_shares_count_generating_training_and_switching() -> None:
    answer = simulate(spec_of(TWO_CARDS)).answer
    assert answer.makespan == 11
    assert answer.generator_idle == pytest.approx(0.5 / 11)  # after its last job at 10.5
    assert answer.trainer_idle == pytest.approx(0)
    assert answer.assisted_samples == answer.helped_samples == 2


def test_without_help_nobody_does_both() -> None:
    both, none = spec_of(TWO_CARDS).with_rules(help="none"), spec_of(TWO_CARDS).with_rules(assist="none")
    assert simulate(both).answer == simulate(none).answer
    assert simulate(both).answer.assisted_samples == 0


def test_assist_trainer_ignores_what_generators_could_train() -> None:
    spec = spec_of(TWO_CARDS).with_rules(assist="trainer", help="auto")
    plain = spec_of(TWO_CARDS, generators=[{"name": "card", "seconds": {1: 2}}]).with_rules(
        assist="trainer", help="auto"
    )
    assert simulate(spec).answer == simulate(plain).answer


def test_an_automatic_slice_stays_automatic() -> None:
    spec = spec_of(SUITE_LIKE)
    assert with_best_slice(spec) == spec
    fixed = min(predict_makespan(spec.with_changes(slice=size)) for size in spec.slice_sizes())
    assert predict_makespan(spec) <= fixed


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"policy": {"assist": "both", "help": "auto", "stream": "batch"}}, "stream"),
        ({"trainer": {"seconds_per_sample": 1}}, "assist"),
        ({"trainer": {**TWO_CARDS["trainer"], "job": 3}}, "job"),
    ],
)
def test_what_does_not_fit_together_is_named(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        spec_of(TWO_CARDS, **changes)


def test_a_run_of_lanes_that_do_both_is_pure() -> None:
    state = initial_scheduler_state(
        spec_of(SUITE_LIKE, slice=1), 0, SharedWorkRule(pieces=((1, 1, 1), (1, 1), (1,)))
    )
    state = replace(state, terms=replace(state.terms, stale_budget=6))
    assert decide(state, Tick(0)) == decide(state, Tick(0))


def test_lanes_do_not_leave_a_step_to_each_other_for_ever() -> None:
    """The first is slow with both slices; the second would have to change its role first."""
    spec = parse_model(Spec, {**TWO_CARDS, "prompts": 1})
    state = initial_scheduler_state(spec, search_budget=0, shared_work=SharedWorkRule(leaves_to_faster=True))
    both, one = state.lanes
    both = replace(both, slice_ns=11 * SECOND, take_ns=(2 * SECOND, 11 * SECOND))
    _, actions = decide(replace(state, lanes=(both, one)), Tick(0))
    assert [type(action) for action in actions] != []
