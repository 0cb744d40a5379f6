"""Busy shares and idle intervals of traces that can be checked by hand."""

from __future__ import annotations

import pytest
from handmade_traces import SECOND, both_trace, helped_trace, large_trace, on_policy_trace, span

from digenrl.telemetry.trace import LaneInfo, Span, Trace, Work
from digenrl.telemetry.utilization import Intervals, lane_uses, pool_share, spans_by_lane


def busy_shares(trace: Trace) -> dict[str, float]:
    return {name: use.busy_share for name, use in lane_uses(trace).items()}


def idle_intervals(trace: Trace) -> dict[str, Intervals]:
    return {name: use.idle for name, use in lane_uses(trace).items()}


def seconds(intervals: tuple[tuple[int, int], ...]) -> list[tuple[float, float]]:
    return [(start_ns / SECOND, end_ns / SECOND) for start_ns, end_ns in intervals]


def test_busy_shares_of_the_worked_example_are_exact() -> None:
    shares = busy_shares(on_policy_trace())
    assert shares == {"fast": 8 / 19, "slow": 12 / 19, "reward-0": 4 / 19, "trainer": 9 / 19}


def test_a_pool_is_as_busy_as_its_lanes_on_average() -> None:
    trace = on_policy_trace()
    assert pool_share(trace, "generator", lane_uses(trace)) == pytest.approx(10 / 19)


def test_bubbles_are_the_gaps_between_spans_and_publishing_fills_none() -> None:
    idle = idle_intervals(on_policy_trace())
    assert seconds(idle["fast"]) == [(4, 10), (14, 19)]
    assert seconds(idle["trainer"]) == [(0, 3.5), (5.5, 6.5), (9, 13.5), (15.5, 16.5)]


def test_the_trainer_is_busy_throughout_help_and_its_helper_lane_while_it_trains() -> None:
    trace = helped_trace()
    assert seconds(idle_intervals(trace)["trainer"]) == [(8, 12)]
    assert seconds(idle_intervals(trace)["helper-0"]) == [(8, 12)]
    assert pool_share(trace, "trainer", lane_uses(trace)) == 10 / 14


def test_a_helper_lane_that_ends_before_its_round_is_idle_until_the_round_ends() -> None:
    lanes = (LaneInfo("trainer", "trainer"), LaneInfo("helper-0", "trainer"), LaneInfo("helper-1", "trainer"))
    spans = (
        span("helper-0", Work.HELP, 0, 3, group=0, size=1),
        span("helper-1", Work.HELP, 0, 2, group=0, first=1, size=1),
        span("trainer", Work.TRAIN, 3, 4, group=0, size=2),
    )
    idle = idle_intervals(Trace(lanes, spans, 4 * SECOND))
    assert idle["trainer"] == () == idle["helper-0"]
    assert seconds(idle["helper-1"]) == [(2, 3)]


def test_generating_on_the_trainers_cards_is_not_trainer_busy() -> None:
    lanes = (LaneInfo("trainer", "trainer"), LaneInfo("helper-0", "trainer"))
    spans = (
        span("helper-0", Work.GENERATE, 0, 3, group=0, size=1),
        span("trainer", Work.TRAIN, 3, 4, group=0, size=1),
    )
    assert busy_shares(Trace(lanes, spans, 4 * SECOND))["trainer"] == 0.25


def test_overlapping_spans_are_counted_once() -> None:
    lanes = (LaneInfo("gen", "generator"),)
    spans = (span("gen", Work.GENERATE, 0, 3, size=1), span("gen", Work.GENERATE, 2, 5, size=1))
    assert busy_shares(Trace(lanes, spans, 10 * SECOND)) == {"gen": 0.5}


def test_work_past_the_end_of_the_run_does_not_count() -> None:
    spans = (span("gen", Work.GENERATE, 1, 9, size=1),)
    assert busy_shares(Trace((LaneInfo("gen", "generator"),), spans, 2 * SECOND)) == {"gen": 0.5}


def test_a_run_of_no_length_is_not_busy() -> None:
    assert busy_shares(Trace((LaneInfo("gen", "generator"),), (), 0)) == {"gen": 0.0}


def test_busy_and_idle_fill_the_run_exactly() -> None:
    trace = large_trace()
    for use in lane_uses(trace).values():
        idle_ns = sum(end_ns - start_ns for start_ns, end_ns in use.idle)
        assert idle_ns == pytest.approx((1 - use.busy_share) * trace.end_ns, abs=1)
        edges = [edge for interval in use.idle for edge in interval]
        assert edges == sorted(set(edges))


def test_every_span_belongs_to_exactly_one_lane() -> None:
    trace = large_trace()
    by_lane = spans_by_lane(trace)
    assert sum(len(spans) for spans in by_lane.values()) == len(trace.spans)
    assert all(one.lane == name for name, spans in by_lane.items() for one in spans)


def test_a_span_on_an_unknown_lane_is_refused() -> None:
    trace = Trace((LaneInfo("gen", "generator"),), (span("ghost", Work.TRAIN, 0, 1),), SECOND)
    with pytest.raises(AssertionError, match="unknown lane 'ghost'"):
        busy_shares(trace)


def test_lanes_that_share_a_card_are_not_idle_while_it_works_in_another_row() -> None:
    lanes = (LaneInfo("gen-0", "generator"), LaneInfo("gen-1", "generator"), LaneInfo("trainer", "trainer"))
    spans = (
        span("gen-0", Work.GENERATE, 0, 4, group=0, size=1),
        span("gen-1", Work.GENERATE, 0, 3, group=1, size=1),
        span("trainer", Work.SWITCH, 4, 5),
        span("trainer", Work.TRAIN, 5, 8, group=0, size=2),
    )
    idle = idle_intervals(Trace(lanes, spans, 8 * SECOND, shared_cards=True))
    assert idle["trainer"] == () == idle["gen-0"]
    assert seconds(idle["gen-1"]) == [(3, 4)]
    assert seconds(idle_intervals(Trace(lanes, spans, 8 * SECOND))["gen-1"]) == [(3, 8)]


def test_a_lane_is_not_idle_before_it_joined_and_after_it_was_lost() -> None:
    lanes = (LaneInfo("early", "generator", left_ns=40), LaneInfo("late", "generator", joined_ns=60))
    spans = (
        Span("early", Work.GENERATE, 0, 30, step=0, group=0, size=1),
        Span("late", Work.GENERATE, 70, 100, step=0, group=1, size=1),
    )
    trace = Trace(lanes, spans, end_ns=100)
    assert idle_intervals(trace) == {"early": ((30, 40),), "late": ((60, 70),)}
    assert busy_shares(trace) == {"early": 0.75, "late": 0.75}
    assert pool_share(trace, "generator", lane_uses(trace)) == 0.75


def test_a_trainer_is_busy_while_its_helper_lanes_evaluate() -> None:
    lanes = (LaneInfo("trainer", "trainer"), LaneInfo("helper-0", "trainer"))
    trace = Trace(lanes, (span("helper-0", Work.EVALUATE, 0, 3),), 4 * SECOND)
    assert busy_shares(trace)["trainer"] == 0.75


def test_a_lane_that_trains_and_sends_gradients_is_busy_and_so_is_a_trainer_whose_card_trains() -> None:
    trace = both_trace()
    assert busy_shares(trace) == {"gen": 13 / 17, "trainer": 16 / 17, "helper-0": 16 / 17}
    assert seconds(idle_intervals(trace)["gen"]) == [(6.5, 9), (15.5, 17)]
    assert seconds(idle_intervals(trace)["trainer"]) == seconds(idle_intervals(trace)["helper-0"]) == [(8, 9)]
    assert pool_share(trace, "trainer", lane_uses(trace)) == 16 / 17


@pytest.mark.parametrize(("shares_work", "share"), [(True, 0.75), (False, 1.0)])
def test_a_trainer_whose_cards_act_alone_is_as_busy_as_they_are_on_average(
    shares_work: bool, share: float
) -> None:
    lanes = (LaneInfo("trainer", "trainer"), LaneInfo("helper-0", "trainer"), LaneInfo("helper-1", "trainer"))
    spans = (
        span("helper-0", Work.HELP, 0, 3, group=0, size=1),
        span("helper-1", Work.HELP, 0, 1, group=0, first=1, size=1),
        span("trainer", Work.COMMIT, 3, 4, group=0, size=2),
    )
    trace = Trace(lanes, spans, 4 * SECOND, shares_work=shares_work)
    assert pool_share(trace, "trainer", lane_uses(trace)) == share
