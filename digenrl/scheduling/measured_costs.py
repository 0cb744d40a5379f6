"""Measured costs replace expected ones during a run."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from digenrl.records import Action, CostsMeasured
from digenrl.scheduling.changes import replace
from digenrl.scheduling.help.choose_help import CLOSE_ENOUGH
from digenrl.scheduling.state import Lane, SchedulerState, idle_rank
from digenrl.scheduling.terms import Costs, Terms


def absorb_costs(state: SchedulerState, event: CostsMeasured) -> tuple[SchedulerState, tuple[Action, ...]]:
    """Future decisions use the new times; jobs under way are not affected.

    A plan for coming bubbles was made for the old times. It is kept if they hardly change: replanning costs a
    search, and a bubble that opens at another moment than planned triggers one anyway.
    """
    costs = replace(
        state.costs,
        train_sample_ns=event.train_sample_ns,
        commit_ns=event.commit_ns,
        publish_ns=event.publish_ns,
        switch_in_ns=event.switch_in_ns,
        switch_out_ns=event.switch_out_ns,
        score_ns=event.score_ns,
        evaluate_ns=event.evaluate_ns,
        save_ns=event.save_ns,
        send_ns=event.send_ns,
    )
    lanes = list(state.lanes)
    for index, slice_ns in event.lane_slice_ns:
        lanes[index] = replace(lanes[index], slice_ns=max(1, slice_ns))  # never zero
    for index, train_ns in event.lane_train_ns:
        if lanes[index].train_sample_ns:  # else it was not offered for training
            lanes[index] = replace(lanes[index], train_sample_ns=max(Fraction(1), train_ns))
    for index, publish_ns in event.lane_publish_ns:
        lanes[index] = replace(lanes[index], publish_ns=publish_ns)
    plan = state.bubble_plan
    if plan is not None and not _hardly_changed(state, costs, lanes):
        plan = None
    idle = tuple(sorted(state.idle, key=lambda index: idle_rank(costs, lanes[index])))
    return replace(state, costs=costs, lanes=tuple(lanes), idle=idle, bubble_plan=plan), ()


def _hardly_changed(state: SchedulerState, costs: Costs, lanes: list[Lane]) -> bool:
    """No slice time changed by more than a tenth, nothing else by more than a tenth of itself or of a slice."""
    old_lanes, new_lanes = state.present_lanes, [lanes[index] for index in state.present]
    slice_times = [
        (old.slice_ns, new.slice_ns) for old, new in zip(old_lanes, new_lanes, strict=True) if old.calibrated
    ]
    if any(abs(new - old) * CLOSE_ENOUGH > old for old, new in slice_times):
        return False
    shortest_ns = min((old for old, _ in slice_times), default=0)
    old_times = _times_of_work(state.terms, state.costs, old_lanes)
    new_times = _times_of_work(state.terms, costs, new_lanes)
    return all(
        abs(new - old) * CLOSE_ENOUGH <= max(old, shortest_ns)
        for old, new in zip(old_times, new_times, strict=True)
    )


def _times_of_work(terms: Terms, costs: Costs, lanes: Sequence[Lane]) -> tuple[int, ...]:
    """The times that a decision is based on, per unit of work."""
    return (
        costs.train_ns(terms.samples_per_prompt),
        costs.score_batch_ns(terms.slice_size),
        costs.commit_ns,
        costs.switch_in_ns,
        costs.switch_out_ns,
        *(costs.publication_ns(lane.publish_ns) for lane in lanes if not lane.helper),
    )
