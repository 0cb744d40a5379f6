"""What the trainer does next: train what is ready, commit a trained step, and in a bubble help or wait.

Training work goes before helping, and help never starts while something is ready to train.
"""

from __future__ import annotations

from dataclasses import replace

from digenrl.records import (
    Action,
    Commit,
    Committed,
    Help,
    HelpersReady,
    Publish,
    Return,
    Slice,
    Train,
    Trained,
    TrainerReturned,
    Wait,
)
from digenrl.scheduling.help.choose_help import choose_help
from digenrl.scheduling.slice_assignment import SlicePicker, from_the_front, lease_slices
from digenrl.scheduling.state import (
    BetweenRounds,
    Committing,
    Free,
    Generating,
    Helping,
    SchedulerState,
    StepProgress,
    SwitchingIn,
    SwitchingOut,
    Training,
    fresh_step,
    put_group,
    put_step,
)
from digenrl.scheduling.terms import Terms

Outcome = tuple[SchedulerState, tuple[Action, ...]]


def direct_trainer(state: SchedulerState, at_ns: int) -> Outcome:
    """The trainer's next order, if it is free to take one."""
    if state.finished:
        return state, ()
    if isinstance(state.trainer, Free):
        return _direct_free_trainer(state, at_ns)
    if isinstance(state.trainer, BetweenRounds):
        return _next_round_or_return(state, state.trainer, at_ns)
    if isinstance(state.trainer, Generating) and state.current.ready:
        return replace(state, trainer=SwitchingOut()), (Return(),)
    return state, ()


def absorb_trained(state: SchedulerState, event: Trained) -> Outcome:
    """The samples count as trained, unless their group went into quarantine meanwhile."""
    assert state.trainer == Training(event.slices), f"{event} answers nothing that was asked for"
    step = state.current
    for piece in event.slices:
        step = _mark_trained(state.terms, step, piece)
    return replace(put_step(state, step), trainer=Free()), ()


def absorb_committed(state: SchedulerState, event: Committed) -> Outcome:
    """A new version: the trainer's lanes have it, the generators get it published."""
    assert event.step == state.committed, f"commit of step {event.step} while step {state.committed} is open"
    version = state.committed + 1
    following = version + 1
    opened = (fresh_step(state.terms, following),) if following < state.terms.steps else ()
    shares_cards = state.terms.colocated
    lanes = tuple(replace(lane, version=version) if lane.helper or shares_cards else lane for lane in state.lanes)
    state = replace(state, committed=version, steps=(*state.steps[1:], *opened), lanes=lanes, trainer=Free())
    if state.finished:
        return state, ()
    if shares_cards:
        return replace(state, trainer=SwitchingIn(plan=None)), (Help(),)
    generators = tuple(lane.index for lane in lanes if lane.present and not lane.helper)
    if not generators:
        return state, ()
    due = (version, event.at_ns + state.costs.publish_ns)
    return replace(state, publishing=(*state.publishing, due)), (Publish(version, generators),)


def absorb_helpers_ready(state: SchedulerState, event: HelpersReady) -> Outcome:
    """The helpers start their first round at the next tick, or all lanes generate (colocated)."""
    assert isinstance(state.trainer, SwitchingIn), f"{event} while the trainer is {state.trainer}"
    plan = state.trainer.plan
    return replace(state, trainer=Generating() if plan is None else BetweenRounds(plan, first=True)), ()


def absorb_returned(state: SchedulerState, event: TrainerReturned) -> Outcome:
    """The trainer is free again."""
    assert isinstance(state.trainer, SwitchingOut), f"{event} while the trainer is {state.trainer}"
    return replace(state, trainer=Free()), ()


def _direct_free_trainer(state: SchedulerState, at_ns: int) -> Outcome:
    step = state.current
    if step.untrained_groups == 0:
        return replace(state, trainer=Committing()), (Commit(step.index),)
    if step.ready:
        return _train(state, step)
    return _help_or_wait(state, at_ns)


def _train(state: SchedulerState, step: StepProgress) -> Outcome:
    """One unit at a time while streaming, all groups at once when the step is one batch."""
    at_once = len(step.ready) if state.terms.stream == "batch" else 1
    slices = tuple(Slice(step.index, unit.group, unit.first, unit.size) for unit in step.ready[:at_once])
    state = put_step(state, replace(step, ready=step.ready[at_once:]))
    return replace(state, trainer=Training(slices)), (Train(slices),)


def _mark_trained(terms: Terms, step: StepProgress, piece: Slice) -> StepProgress:
    group = step.groups[piece.group]
    if group.retired:
        return step
    assert not group.trained & piece.mask(), f"{piece} was trained twice"
    group = replace(group, trained=group.trained | piece.mask())
    complete = group.trained.bit_count() == terms.samples_per_prompt
    return replace(
        step,
        groups=put_group(step, piece.group, group),
        untrained_groups=step.untrained_groups - complete,
    )


def _help_or_wait(state: SchedulerState, at_ns: int) -> Outcome:
    """A bubble: one decision, at its opening, if there is a slice that the trainer may start."""
    assert isinstance(state.trainer, Free)
    if state.trainer.bubble_decided or state.terms.help == "none" or not state.helpers:
        return state, ()
    if not SlicePicker(state).may_start(state.committed):
        return replace(state, trainer=Free(bubble_decided=True)), ()
    plan, bubble_plan = choose_help(state, at_ns)
    state = replace(state, bubble_plan=bubble_plan)
    if plan is None:
        return replace(state, trainer=Free(bubble_decided=True)), (Wait(),)
    return replace(state, trainer=SwitchingIn(plan)), (Help(),)


def _next_round_or_return(state: SchedulerState, between: BetweenRounds, at_ns: int) -> Outcome:
    """Runs another round while the plan asks for one and a slice may start; else the lanes go back."""
    plan, picker = between.plan, SlicePicker(state)
    wanted = plan.rounds_left > 0 and bool(state.helpers)
    if plan.stop_when_ready and state.current.ready and not between.first:
        wanted = False
    if plan.current_step_only and not picker.current_step_unstarted():
        wanted = False
    if wanted and picker.may_start(state.committed):
        state, actions = lease_slices(state, picker, from_the_front(state, state.helpers), at_ns)
        return replace(state, trainer=Helping(replace(plan, rounds_left=plan.rounds_left - 1))), actions
    return replace(state, trainer=SwitchingOut()), (Return(),)
