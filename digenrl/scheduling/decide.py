"""The scheduler: a pure function from a state and an event to the next state and the actions to take.

Every event except Tick only records a fact (and passes generated samples on to be scored). Tick closes an
instant: idle generator lanes take slices, then the trainer gets its order. Whoever drives it, a virtual clock,
one machine or a cluster, reports all events of an instant and then ticks.

Answers of generators and scorers may come late or twice: an answer to what its lane no longer holds is dropped.
The trainer is one unit, whose loss ends the run: it answers each order once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from digenrl import records
from digenrl.records import Action, Event, SliceDone, Tick
from digenrl.scheduling import faults, scoring
from digenrl.scheduling import measured_costs as measuring
from digenrl.scheduling import trainer_turns as trainer
from digenrl.scheduling.slice_assignment import hand_out
from digenrl.scheduling.state import Generating, SchedulerState, open_step

Outcome = tuple[SchedulerState, tuple[Action, ...]]


def decide(state: SchedulerState, event: Event) -> Outcome:
    """The state after `event`, and what to do. Neither the old state nor anything else is changed."""
    return _ABSORB[type(event)](state, event)


def _absorb_slice_done(state: SchedulerState, event: SliceDone) -> Outcome:
    """A lane is free and its samples go to be scored; an answer to a lease no longer held is dropped."""
    if not faults.holds(state, event.lease):
        return state, ()
    state = faults.release(state, event.lease)
    piece = event.lease.slice
    step = open_step(state, piece.step)
    if step is None or step.groups[piece.group].retired:
        return state, ()  # of a group in quarantine; its step may be committed by now
    return scoring.enqueue(state, piece, event.at_ns)


def _tick(state: SchedulerState, event: Tick) -> Outcome:
    generate: tuple[Action, ...] = ()
    if not state.terms.colocated or isinstance(state.trainer, Generating):
        state, generate = hand_out(state, event.at_ns)
    state, orders = trainer.direct_trainer(state, event.at_ns)
    return state, (*generate, *orders)


_ABSORB: dict[type[Event], Callable[[SchedulerState, Any], Outcome]] = {
    records.Tick: _tick,
    records.SliceDone: _absorb_slice_done,
    records.SliceFailed: faults.absorb_slice_failed,
    records.SamplesScored: scoring.absorb_scores,
    records.ScoreFailed: faults.absorb_score_failed,
    records.Trained: trainer.absorb_trained,
    records.Committed: trainer.absorb_committed,
    records.Published: faults.absorb_published,
    records.HelpersReady: trainer.absorb_helpers_ready,
    records.TrainerReturned: trainer.absorb_returned,
    records.WorkerJoined: faults.absorb_joined,
    records.WorkerLost: faults.absorb_lost,
    records.CostsMeasured: measuring.absorb_costs,
}
