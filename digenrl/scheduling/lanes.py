"""Generator lanes: they join, take jobs, become idle again, and load new versions."""

from __future__ import annotations

from bisect import bisect

from digenrl.records import Publish, Published, Slice, WorkerJoined
from digenrl.scheduling.changes import replace
from digenrl.scheduling.repeated_steps import repeats_stale_slices
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
    lanes_with,
    put_lane,
)


def absorb_joined(state: SchedulerState, event: WorkerJoined) -> Outcome:
    """The new lane gets the newest version. It takes slices once that is loaded and the lane is calibrated."""
    lane = lane_of(len(state.lanes), event.offer, helper=False, version=NO_VERSION)
    state = make_idle(state, replace(lane, sent_version=state.committed))
    state = replace(state, present=(*state.present, lane.index))
    state, publish = issue(state, event.at_ns, Publish, state.committed, (lane.index,))
    return state, (publish,)


def absorb_published(state: SchedulerState, event: Published) -> Outcome:
    """The lanes serve the version from their next slice on. Versions only grow."""
    version, lanes = event.job.version, list(state.lanes)
    for index in event.lanes:
        if lanes[index].version < version:
            lanes[index] = replace(lanes[index], version=version)
    served: dict[int, list[int]] = {}  # versions on lanes that get them at the same time
    for lane in (lanes[index] for index in state.present):
        if not lane.helper:
            served.setdefault(state.costs.publication_ns(lane.publish_ns), []).append(lane.version)
    # What is older than the newest version on any such lane is superseded, even if some of them never got it.
    publishing = tuple(
        each for each in state.publishing if any(min(on) < each[0] >= max(on) for on in served.values())
    )
    return replace(state, lanes=tuple(lanes), publishing=publishing), ()


def publish_newest(state: SchedulerState, at_ns: int) -> Outcome:
    """Publishes the newest version to every generator lane that has not been sent it.

    It waits while an older version is still being sampled for its evaluation or, in a resumed run, for slices that
    are recorded as stale, and for weights that were lost.
    """
    version = state.committed
    if state.exporting is not None:
        return state, ()
    if state.all_committed and not any(each.version == version for each in state.evaluations):
        return state, ()  # no lane will use it
    if any(each.version < version and not each.sampled for each in state.evaluations):
        return state, ()
    if repeats_stale_slices(state):
        return state, ()
    behind = [lane for lane in state.present_lanes if not lane.helper and lane.sent_version < version]
    if not behind:
        return state, ()
    lanes = list(state.lanes)
    for lane in behind:
        lanes[lane.index] = replace(lane, sent_version=version)
    state, publish = issue(state, at_ns, Publish, version, tuple(lane.index for lane in behind))
    return replace(state, lanes=tuple(lanes), publishing=(*state.publishing, (version, at_ns))), (publish,)


def release(state: SchedulerState, index: int, trained: tuple[Slice, ...] | None = None) -> SchedulerState:
    """Takes the job from a lane, and puts what it has `trained`, if given.

    A round of help ends when the last of the helpers' jobs is gone.
    """
    lane = state.lanes[index]
    lane = replace(lane, job=None, trained=lane.trained if trained is None else trained)
    if state.terms.colocated or state.terms.shares_work or not lane.helper:
        return make_idle(state, lane)
    return end_round_if_over(put_lane(state, lane))


def make_idle(state: SchedulerState, lane: Lane) -> SchedulerState:
    """Puts a lane that has become idle: into the idle list, too, or to those that wait for calibration."""
    lanes = lanes_with(state, lane)
    if not lane.calibrated:
        return replace(state, lanes=lanes, uncalibrated=(*state.uncalibrated, lane.index))
    rank = idle_rank(state.costs, lane)
    place = bisect(state.idle, rank, key=lambda index: idle_rank(state.costs, state.lanes[index]))
    return replace(state, lanes=lanes, idle=(*state.idle[:place], lane.index, *state.idle[place:]))


def end_round_if_over(state: SchedulerState) -> SchedulerState:
    """Ends the round of help if no helper lane holds a job."""
    if not isinstance(state.trainer, Helping):
        return state
    if any(state.lanes[index].job is not None for index in state.helpers):
        return state
    return replace(state, trainer=BetweenRounds(state.trainer.plan, state.trainer.rounds_done))
