"""Hedging: a slice that takes far longer than expected is also given to an idle lane, and the first result counts.

A job may be hedged once it has taken `terms.hedge_after` times as long as expected, and at least a second. What
has taken that long is expected to take as long again, so a copy pays if a lane generates it in less time than the
job has taken so far. Only lanes that have nothing else to do take copies.

The copy uses the weights of its own lane, which are at least as new as those of the job. When one of the two has
its result, the other one is void: its lane is busy until it answers, and the answer is dropped. If one of them is
lost or fails, the other one carries on alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from digenrl.records import Action, Generate, Wake
from digenrl.scheduling.changes import replace
from digenrl.scheduling.state import Lane, Outcome, SchedulerState, is_wanted, put_lane

LEAST_NS = 1_000_000_000  # shorter delays are not worth a copy


# --- Decisions -------------------------------------------------------------------------------------------------


def hedge_stragglers(state: SchedulerState, at_ns: int) -> Outcome:
    """Idle lanes take copies of overdue slices. If one will be overdue later, asks to be woken then."""
    actions: list[Action] = []
    for due_ns, job in sorted(_hedgeable(state), key=lambda each: (each[0], each[1].id)):
        idle = [state.lanes[index] for index in state.idle if _can_copy(state, state.lanes[index], job)]
        if not idle:
            continue
        if due_ns > at_ns:
            state, wake = _wake(state, due_ns, at_ns)
            return state, (*actions, *wake)
        state, copy = _copy(state, idle[0], job, at_ns)
        actions += copy
    return state, tuple(actions)


def _hedgeable(state: SchedulerState) -> Iterator[tuple[int, Generate]]:
    """Jobs without a copy, and when they may be hedged."""
    in_pairs = {job_id for pair in state.copies for job_id in pair} | state.void_jobs
    for lane in state.present_lanes:
        job = lane.job
        if isinstance(job, Generate) and job.id not in in_pairs and is_wanted(state, job.slice):
            expected_ns = lane.expected_ns(state.terms.slices_in(job.slice.size))
            yield job.issued_ns + max(LEAST_NS, round(state.terms.hedge_after * expected_ns)), job


def _can_copy(state: SchedulerState, lane: Lane, job: Generate) -> bool:
    """The lane has weights for the slice, takes that many at once, and holds no gradients to be sent soon."""
    enough = lane.slices_at_once >= state.terms.slices_in(job.slice.size)
    return enough and job.version <= lane.version <= job.slice.step and not lane.helper and not lane.trained


def _copy(state: SchedulerState, lane: Lane, job: Generate, at_ns: int) -> Outcome:
    takes_ns = lane.expected_ns(state.terms.slices_in(job.slice.size))
    pays_ns = job.issued_ns + takes_ns
    if pays_ns > at_ns:
        return _wake(state, pays_ns, at_ns)
    copy = Generate(state.jobs_issued, at_ns, job.slice, lane.index, lane.version, hedges=job.id)
    lane = replace(lane, job=copy, role="generate", ends_ns=at_ns + takes_ns)
    state = replace(
        put_lane(state, lane),
        idle=tuple(index for index in state.idle if index != lane.index),
        jobs_issued=state.jobs_issued + 1,
        copies=(*state.copies, (job.id, copy.id)),
    )
    return state, (copy,)


def _wake(state: SchedulerState, due_ns: int, at_ns: int) -> Outcome:
    """Asks for a tick at this time, unless there will be one until then."""
    if at_ns < state.wake_ns <= due_ns:
        return state, ()
    return replace(state, wake_ns=due_ns), (Wake(due_ns),)


# --- Results and losses ----------------------------------------------------------------------------------------


def take_first(state: SchedulerState, job: Generate) -> tuple[SchedulerState, bool]:
    """A job has its result. Also returns whether it counts: not if its copy was faster."""
    if job.id in state.void_jobs:
        return replace(state, void_jobs=state.void_jobs - {job.id}), False
    state, other = _leave_pair(state, job)
    return (state if other is None else replace(state, void_jobs=state.void_jobs | {other})), True


def drop_job(state: SchedulerState, job: Generate) -> tuple[SchedulerState, bool]:
    """A job is lost or has failed. Also returns whether its slice has to be issued again."""
    if job.id in state.void_jobs:
        return replace(state, void_jobs=state.void_jobs - {job.id}), False
    state, other = _leave_pair(state, job)
    return state, other is None


def _leave_pair(state: SchedulerState, job: Generate) -> tuple[SchedulerState, int | None]:
    """The state without the job's pair, if it has one, and the other job of that pair."""
    for pair in state.copies:
        if job.id in pair:
            left = tuple(each for each in state.copies if each != pair)
            return replace(state, copies=left), pair[1] if pair[0] == job.id else pair[0]
    return state, None
