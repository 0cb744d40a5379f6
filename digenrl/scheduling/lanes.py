"""Generator lanes: they join, take jobs, become idle again, and load new versions."""

from __future__ import annotations

from bisect import bisect
from dataclasses import replace

from digenrl.records import Publish, Published, WorkerJoined
from digenrl.scheduling.state import (
    NO_VERSION,
    BetweenRounds,
    Helping,
    Lane,
    Outcome,
    SchedulerState,
    idle_rank,
    issue,
    lane_of,
    put_lane,
)


def absorb_joined(state: SchedulerState, event: WorkerJoined) -> Outcome:
    """The new lane gets the newest version. It takes slices once that is loaded and the lane is calibrated."""
    lane = lane_of(len(state.lanes), event.offer, helper=False, version=NO_VERSION)
    lane = replace(lane, sent_version=state.committed)
    state = make_idle(replace(state, lanes=(*state.lanes, lane)), lane)
    state, publish = issue(state, event.at_ns, Publish, state.committed, (lane.index,))
    return state, (publish,)


def absorb_published(state: SchedulerState, event: Published) -> Outcome:
    """The lanes serve the version from their next slice on. Versions only grow."""
    version, lanes = event.job.version, list(state.lanes)
    for index in event.lanes:
        if lanes[index].version < version:
            lanes[index] = replace(lanes[index], version=version)
    served: dict[int, list[int]] = {}  # versions on lanes that get them at the same time
    for lane in lanes:
        if lane.present and not lane.helper:
            served.setdefault(state.costs.publication_ns(lane.publish_ns), []).append(lane.version)
    # What is older than the newest version on any such lane is superseded, even if some of them never got it.
    publishing = tuple(
        each for each in state.publishing if any(min(on) < each[0] >= max(on) for on in served.values())
    )
    return replace(state, lanes=tuple(lanes), publishing=publishing), ()


def publish_newest(state: SchedulerState, at_ns: int) -> Outcome:
    """Publishes the newest version to every generator lane that has not been sent it.

    It waits while an older version is still being sampled for its evaluation, and for weights that were lost.
    """
    version = state.committed
    if state.exporting is not None:
        return state, ()
    if state.all_committed and not any(each.version == version for each in state.evaluations):
        return state, ()  # no lane will use it
    if any(each.version < version and not each.sampled for each in state.evaluations):
        return state, ()
    behind = [lane for lane in state.lanes if lane.present and not lane.helper and lane.sent_version < version]
    if not behind:
        return state, ()
    lanes = list(state.lanes)
    for lane in behind:
        lanes[lane.index] = replace(lane, sent_version=version)
    state, publish = issue(state, at_ns, Publish, version, tuple(lane.index for lane in behind))
    return replace(state, lanes=tuple(lanes), publishing=(*state.publishing, (version, at_ns))), (publish,)


def release(state: SchedulerState, index: int) -> SchedulerState:
    """Takes the job from a lane. A round of help ends when the last of the helpers' jobs is gone."""
    lane = replace(state.lanes[index], job=None)
    state = put_lane(state, lane)
    if state.terms.colocated or state.terms.shares_work or not lane.helper:
        return make_idle(state, lane)
    return end_round_if_over(state)


def make_idle(state: SchedulerState, lane: Lane) -> SchedulerState:
    """Adds a lane to the idle list, or to those that wait for calibration."""
    if not lane.calibrated:
        return replace(state, uncalibrated=(*state.uncalibrated, lane.index))
    rank = idle_rank(state.costs, lane)
    place = bisect(state.idle, rank, key=lambda index: idle_rank(state.costs, state.lanes[index]))
    return replace(state, idle=(*state.idle[:place], lane.index, *state.idle[place:]))


def end_round_if_over(state: SchedulerState) -> SchedulerState:
    """Ends the round of help if no helper lane holds a job."""
    if not isinstance(state.trainer, Helping):
        return state
    if any(state.lanes[index].job is not None for index in state.helpers):
        return state
    return replace(state, trainer=BetweenRounds(state.trainer.plan, state.trainer.rounds_done))
