"""The scheduler: a pure function from a state and an event to the next state and the actions to take.

Every event except Tick records a fact, and passes generated samples on to be scored. Tick closes an instant: new
lanes are calibrated, idle generator lanes take held-out chunks and slices, then the trainer gets its next job. A
driver reports all events of an instant and then a Tick.

Results of generators and reward lanes may be late or doubled: a result for a job that its lane no longer holds is
dropped. The trainer answers each job once, or is reported as lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from digenrl import records
from digenrl.records import Action, Encoded, Event, Generated, StopRequested, Tick, Trained
from digenrl.scheduling import (
    calibration,
    evaluation,
    faults,
    hedging,
    lanes,
    measured_costs,
    scoring,
    shared_gradients,
    shared_work,
    trainer_turns,
)
from digenrl.scheduling.changes import replace
from digenrl.scheduling.slice_assignment import hand_out_slices
from digenrl.scheduling.state import Generating, Outcome, SchedulerState, open_step


def decide(state: SchedulerState, event: Event) -> Outcome:
    """The state after `event`, and what to do. The old state is not changed."""
    return _ABSORB[type(event)](state, event)


def _absorb_generated(state: SchedulerState, event: Generated) -> Outcome:
    """The lane is idle again, and its samples go to be scored."""
    job, piece = event.job, event.job.slice
    if state.lanes[job.lane].job != job:
        return state, ()
    state, counts = hedging.take_first(lanes.release(state, job.lane), job)
    if not counts:
        return state, ()
    step = open_step(state, piece.step)
    if step is None or step.groups[piece.group].retired:
        return state, ()  # quarantined meanwhile; its step may be committed by now
    if event.version >= piece.step:
        state = faults.return_stale_samples(state, piece)  # a newer version had arrived before it started
    if event.score_failure:
        return faults.quarantine(state, piece, event.score_failure, event.at_ns)
    return scoring.enqueue(state, piece, event.at_ns)


def _absorb_trained(state: SchedulerState, event: Trained) -> Outcome:
    absorb = shared_gradients.absorb_trained if state.terms.shares_work else trainer_turns.absorb_trained
    return absorb(state, event)


def _absorb_encoded(state: SchedulerState, event: Encoded) -> Outcome:
    return replace(state, encoding=tuple(job for job in state.encoding if job != event.job)), ()


def _absorb_stop(state: SchedulerState, event: StopRequested) -> Outcome:
    """No new work except a checkpoint."""
    return replace(state, stopping=True), ()


def _tick(state: SchedulerState, event: Tick) -> Outcome:
    if state.stopping:
        return trainer_turns.save_and_stop(state, event.at_ns)
    first: tuple[Action, ...] = ()
    if state.uncalibrated:
        state, first = calibration.hand_out_calibrations(state, event.at_ns)
    if state.steps and state.current.recorded is not None:  # the newest version may have waited for its slices
        state, published = lanes.publish_newest(state, event.at_ns)
        first = (*first, *published)
    if state.terms.shares_work:
        state, chunks = evaluation.hand_out_chunks(state, event.at_ns)
        state, jobs = shared_work.hand_out_work(state, event.at_ns)
        state, copies = _hedge(state, event.at_ns)
        return state, (*first, *chunks, *jobs, *copies)
    handed_out: tuple[Action, ...] = ()
    if not state.terms.colocated or isinstance(state.trainer, Generating):
        chunks = ()
        if state.evaluations:
            state, chunks = evaluation.hand_out_chunks(state, event.at_ns)
        state, slices = hand_out_slices(state, event.at_ns)
        state, copies = _hedge(state, event.at_ns)
        handed_out = (*chunks, *slices, *copies)
    state, orders = trainer_turns.direct_trainer(state, event.at_ns)
    return state, (*first, *handed_out, *orders)


def _hedge(state: SchedulerState, at_ns: int) -> Outcome:
    """Lanes that are still idle may help with slices that take too long."""
    if not state.terms.hedge_after or not state.idle or state.terms.colocated:
        return state, ()
    return hedging.hedge_stragglers(state, at_ns)


_ABSORB: dict[type[Event], Callable[[SchedulerState, Any], Outcome]] = {
    records.Tick: _tick,
    records.Encoded: _absorb_encoded,
    records.Generated: _absorb_generated,
    records.Scored: scoring.absorb_scored,
    records.Trained: _absorb_trained,
    records.GradientsSent: shared_gradients.absorb_gradients_sent,
    records.UpdateTaken: shared_gradients.absorb_update_taken,
    records.Committed: trainer_turns.absorb_committed,
    records.Published: lanes.absorb_published,
    records.RoleSwitched: trainer_turns.absorb_role_switched,
    records.Evaluated: evaluation.absorb_evaluated,
    records.Calibrated: calibration.absorb_calibrated,
    records.Saved: trainer_turns.absorb_saved,
    records.Exported: trainer_turns.absorb_exported,
    records.Restored: trainer_turns.absorb_restored,
    records.JobFailed: faults.absorb_failed,
    records.ArtifactLost: faults.absorb_artifact_lost,
    records.WorkerJoined: lanes.absorb_joined,
    records.WorkerLost: faults.absorb_lost,
    records.WorkerRestarted: scoring.absorb_restarted,
    records.CostsMeasured: measured_costs.absorb_costs,
    records.StopRequested: _absorb_stop,
}
