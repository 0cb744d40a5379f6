"""Lanes that come and go, slices that fail, rewards that fail: nothing is lost, nothing is used twice.

What was lost or failed is handed out again, together or slice by slice, under new epochs, and gives the same
samples. A group with a sample that cannot be made or scored goes into quarantine whole, and a fresh group takes
its place in the step.
"""

from __future__ import annotations

from bisect import bisect, insort
from dataclasses import replace

from digenrl.records import (
    Action,
    GiveUp,
    Lease,
    Publish,
    Published,
    Quarantine,
    ScoreFailed,
    Slice,
    SliceFailed,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling.order import positions, positions_of_group, slices_in, slices_of_group
from digenrl.scheduling.scoring import awaits_score, free_scorer, start_scoring
from digenrl.scheduling.state import (
    NO_VERSION,
    BetweenRounds,
    GroupProgress,
    Helping,
    Lane,
    SchedulerState,
    StepProgress,
    lane_of,
    open_step,
    put_group,
    put_lane,
    put_step,
    reconsider_help,
)
from digenrl.scheduling.terms import Terms

Outcome = tuple[SchedulerState, tuple[Action, ...]]


def absorb_joined(state: SchedulerState, event: WorkerJoined) -> Outcome:
    """A new lane gets the newest version first; it takes slices once that is loaded."""
    index = len(state.lanes)
    lane = lane_of(index, event.offer, helper=False, version=NO_VERSION)
    state = replace(state, lanes=(*state.lanes, lane))
    return make_idle(state, lane), (Publish(state.committed, (index,)),)


def absorb_lost(state: SchedulerState, event: WorkerLost) -> Outcome:
    """The lane is out; its slice waits to be handed out again.

    A trainer that chose to wait may have counted on this lane, so it decides again.
    """
    lane = state.lanes[event.lane]
    if not lane.present:
        return state, ()
    state = put_lane(state, replace(lane, present=False, lease=None))
    state = replace(
        state,
        idle=tuple(index for index in state.idle if index != lane.index),
        helpers=tuple(index for index in state.helpers if index != lane.index),
    )
    return reconsider_help(state if lane.lease is None else reissue(state, lane.lease)), ()


def absorb_published(state: SchedulerState, event: Published) -> Outcome:
    """Lanes serve the version from their next slice on; versions only grow."""
    lanes = list(state.lanes)
    for index in event.lanes:
        if lanes[index].version < event.version:
            lanes[index] = replace(lanes[index], version=event.version)
    served = [lane.version for lane in lanes if lane.present and not lane.helper] or [event.version]
    # What is older than the newest that any lane has is superseded, even if some lane never got it.
    publishing = tuple(each for each in state.publishing if each[0] > min(served) and each[0] >= max(served))
    return replace(state, lanes=tuple(lanes), publishing=publishing), ()


def absorb_slice_failed(state: SchedulerState, event: SliceFailed) -> Outcome:
    """Hands the slice out again; after a set number of failures its group goes into quarantine."""
    lease = event.lease
    if not holds(state, lease):
        return state, ()
    state = release(state, lease)
    step = open_step(state, lease.slice.step)
    if step is None:
        return state, ()  # of a group in quarantine, whose step is committed by now
    group = step.groups[lease.slice.group]
    failures = group.failures + 1
    state = put_step(
        state, replace(step, groups=put_group(step, lease.slice.group, replace(group, failures=failures)))
    )
    state = reissue(state, lease)
    if failures < state.terms.slice_failures_per_group:
        return state, ()
    return quarantine(state, lease.slice, event.reason)


def absorb_score_failed(state: SchedulerState, event: ScoreFailed) -> Outcome:
    """A failed reward is never a number: the group goes into quarantine."""
    if not awaits_score(state, event.scorer, event.slice):
        return state, ()
    state = free_scorer(state, event.scorer)
    state, actions = quarantine(state, event.slice, event.reason)
    state, more = start_scoring(state, event.at_ns)
    return state, (*actions, *more)


def holds(state: SchedulerState, lease: Lease) -> bool:
    """Whether the lane still holds this very lease; anything else is a late or doubled answer."""
    held = state.lanes[lease.lane].lease
    return held is not None and held.epoch == lease.epoch


def release(state: SchedulerState, lease: Lease) -> SchedulerState:
    """Takes the lease from its lane; a round ends when the last of the helpers' leases is gone."""
    lane = replace(state.lanes[lease.lane], lease=None)
    state = put_lane(state, lane)
    if state.terms.colocated or not lane.helper:
        return make_idle(state, lane)
    return _end_round_if_over(state)


def make_idle(state: SchedulerState, lane: Lane) -> SchedulerState:
    """Enters a free lane into the idle list, which is kept quickest first."""
    keys = [(state.lanes[index].slice_ns, index) for index in state.idle]
    place = bisect(keys, (lane.slice_ns, lane.index))
    return replace(state, idle=(*state.idle[:place], lane.index, *state.idle[place:]))


def reissue(state: SchedulerState, lease: Lease) -> SchedulerState:
    """Puts the slices of a lease back into its step's list, before everything that was never started."""
    step, piece = open_step(state, lease.slice.step), lease.slice
    state = _end_round_if_over(state)
    if step is None or step.groups[piece.group].retired:
        return state
    waiting = list(step.reissue)
    for each in slices_in(state.terms, piece):
        insort(waiting, each, key=positions(state.terms))
    group = step.groups[piece.group]
    returned = piece.size if lease.stale else 0
    step = replace(
        step,
        reissue=tuple(waiting),
        groups=put_group(step, piece.group, replace(group, stale=group.stale - returned)),
        stale_samples=step.stale_samples - returned,
    )
    return reconsider_help(put_step(state, step))


def quarantine(state: SchedulerState, piece: Slice, reason: str) -> Outcome:
    """Retires a group with all its samples and appends a fresh one to its step."""
    terms, step = state.terms, open_step(state, piece.step)
    if step is None or step.groups[piece.group].retired:
        return state, ()
    if len(step.groups) - terms.prompts >= terms.replacements_per_step:
        return state, (GiveUp(f"{terms.replacements_per_step} groups of step {step.index} failed: {reason}"),)
    old, replaced_by = step.groups[piece.group], len(step.groups)
    was_complete = old.scored == (1 << terms.samples_per_prompt) - 1
    assert old.trained.bit_count() < terms.samples_per_prompt, f"{piece} failed after its group was trained"
    fresh_slices = slices_of_group(terms, step.index, replaced_by)
    step = replace(
        step,
        reissue=(*(each for each in step.reissue if each.group != piece.group), *fresh_slices),
        groups=(*put_group(step, piece.group, replace(old, retired=True, stale=0)), GroupProgress()),
        ready=tuple(unit for unit in step.ready if unit.group != piece.group),
        unscored_groups=step.unscored_groups + was_complete,
        stale_samples=step.stale_samples - old.stale,
        ahead=_with_retired(terms, step, piece.group),
    )
    state = reconsider_help(put_step(state, step))
    unscored = tuple(each for each in state.unscored if (each.step, each.group) != (piece.step, piece.group))
    return replace(state, unscored=unscored), (Quarantine(step.index, piece.group, replaced_by, reason),)


def _with_retired(terms: Terms, step: StepProgress, group: int) -> tuple[int, ...]:
    """The positions that are not to be handed out any more, those of a retired group among them."""
    if group >= terms.prompts:
        return step.ahead  # a replacement: its slices never were in the list
    retired = (position for position in positions_of_group(terms, group) if position >= step.cursor)
    return tuple(sorted({*step.ahead, *retired}))


def _end_round_if_over(state: SchedulerState) -> SchedulerState:
    if not isinstance(state.trainer, Helping):
        return state
    if any(state.lanes[index].lease is not None for index in state.helpers):
        return state
    return replace(state, trainer=BetweenRounds(state.trainer.plan, first=False))
