"""Calibration of lanes that join a run: a lane whose times are unknown generates a little before it gets slices.

The lanes that a run starts with are calibrated before there is a schedule, since the slice size depends on their
times.
"""

from __future__ import annotations

from digenrl.records import Calibrate, Calibrated
from digenrl.scheduling.changes import replace
from digenrl.scheduling.encoding import encode
from digenrl.scheduling.lanes import release
from digenrl.scheduling.state import Outcome, SchedulerState, give_lanes, lane_of, put_lane


def hand_out_calibrations(state: SchedulerState, at_ns: int) -> Outcome:
    """Every lane without known times gets its Calibrate job. The prompt may have to be encoded for it."""
    step = min(state.committed, state.terms.steps - 1)
    state, encoding = encode(state, [(step, 0)], at_ns)
    jobs = [
        Calibrate(job_id, at_ns, "generate", lane=index, step=step)
        for job_id, index in enumerate(state.uncalibrated, start=state.jobs_issued)
    ]
    return replace(give_lanes(state, jobs), uncalibrated=()), (*encoding, *jobs)


def absorb_calibrated(state: SchedulerState, event: Calibrated) -> Outcome:
    """The lane's times are known: it takes slices from now on."""
    index = event.job.lane
    lane = state.lanes[index]
    if lane.job != event.job:
        return state, ()
    timed = lane_of(index, event.offer, lane.helper, lane.version)
    lane = replace(lane, slice_ns=timed.slice_ns, take_ns=timed.take_ns, train_sample_ns=timed.train_sample_ns)
    state = put_lane(state, lane)
    return release(state, index), ()
