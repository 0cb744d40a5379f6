"""A resumed run generates stale samples with the versions that the interrupted run had used.

Slices that are recorded as stale come first in their step's list. Until they are generated, lanes with the step's
own version wait, and this version is not published. If no lane is left that serves the version one behind, they
are generated as all others.
"""

from __future__ import annotations

from digenrl.records import Generate, Slice
from digenrl.scheduling.state import SchedulerState, StepProgress
from digenrl.scheduling.terms import Terms


def recorded_as_stale(step: StepProgress, piece: Slice) -> bool:
    """Whether an interrupted run has generated a slice with the version one behind."""
    return step.recorded is not None and step.recorded.has(piece)


def stale_budget(terms: Terms, step: StepProgress) -> int:
    """The samples of a step that may come from the version one behind."""
    record, most = step.recorded, terms.shared_work.most_stale
    if record is None and most is not None:
        return min(most, terms.stale_budget)
    if record is None or not record.closed:
        return terms.stale_budget
    return sum(samples.bit_count() for _, samples in record.stale)


def is_served(state: SchedulerState, version: int) -> bool:
    """Whether a generator lane serves a version or is about to load it, and no newer one was sent to it."""
    return any(not lane.helper and lane.sent_version == version for lane in state.present_lanes)


def repeats_stale_slices(state: SchedulerState) -> bool:
    """Whether slices of the current step have yet to be generated with the version one behind, as recorded."""
    if not state.steps or state.current.recorded is None or not is_served(state, state.current.index - 1):
        return False
    terms, step = state.terms, state.current
    room = step.stale_samples + terms.slice_size <= stale_budget(terms, step)
    held = (lane.job for lane in state.present_lanes if isinstance(lane.job, Generate) and lane.job.stale)
    generating = (job.slice for job in held if job.slice.step == step.index)
    pieces = (*(step.reissue[:1] if room else ()), *generating)
    return any(recorded_as_stale(step, piece) for piece in pieces)
