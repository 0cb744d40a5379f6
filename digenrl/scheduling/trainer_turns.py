"""What the trainer does next: train what is ready, commit a trained step, save, and in a bubble help or wait.

Training goes before helping, and help never starts while something is ready to train.
"""

from __future__ import annotations

from digenrl.records import (
    Commit,
    Committed,
    Export,
    Exported,
    Restored,
    RoleSwitched,
    Save,
    Saved,
    Slice,
    SwitchRole,
    Train,
    Trained,
    Wait,
)
from digenrl.scheduling.changes import replace
from digenrl.scheduling.encoding import encode_step
from digenrl.scheduling.evaluation import abandon_if_unservable, awaits_publication
from digenrl.scheduling.help.choose_help import choose_help
from digenrl.scheduling.lanes import publish_newest
from digenrl.scheduling.slice_assignment import SlicePicker, issue_slices, take_from_front
from digenrl.scheduling.state import (
    BetweenRounds,
    Free,
    Generating,
    Helping,
    HelpPlan,
    Outcome,
    Restoring,
    SchedulerState,
    StepProgress,
    SwitchingIn,
    free_trainer,
    fresh_evaluation,
    fresh_step,
    give_trainer,
    issue,
    put_group,
    put_step,
)
from digenrl.scheduling.terms import Terms


def direct_trainer(state: SchedulerState, at_ns: int) -> Outcome:
    """The trainer's next job, if it can take one."""
    if state.all_committed:  # a restored trainer may still have to evaluate
        return _generate_if_colocated(state, at_ns) if isinstance(state.trainer, Free) else (state, ())
    if isinstance(state.trainer, Free):
        return _direct_free_trainer(state, at_ns)
    if isinstance(state.trainer, BetweenRounds):
        return _next_round_or_return(state, state.trainer, at_ns)
    if isinstance(state.trainer, Generating) and state.current.ready and not _evaluating(state):
        return give_trainer(state, at_ns, SwitchRole, "train")
    return state, ()


def save_and_stop(state: SchedulerState, at_ns: int) -> Outcome:
    """Saves the last version as soon as the trainer's current job has ended."""
    shares_cards = state.terms.colocated or state.terms.shares_work
    lanes_busy = any(lane.job for lane in state.lanes if state.terms.colocated or (lane.helper and shares_cards))
    if state.finished or lanes_busy or not isinstance(state.trainer, Free | BetweenRounds | Generating):
        return state, ()
    return give_trainer(state, at_ns, Save, state.committed)


# --- Results ---------------------------------------------------------------------------------------------------


def absorb_trained(state: SchedulerState, event: Trained) -> Outcome:
    """The samples count as trained, unless their group was quarantined meanwhile."""
    step = _mark_trained(state.terms, state.current, event.job.slice)
    return put_step(free_trainer(state, event), step), ()


def absorb_committed(state: SchedulerState, event: Committed) -> Outcome:
    """A new version: the trainer's lanes have it, and it is published to the generators.

    If it is due, it is evaluated, and the trainer saves it before anything else.
    """
    state = free_trainer(state, event)
    terms, version, at_ns = state.terms, state.committed + 1, event.at_ns
    following = version + 1
    opened = (fresh_step(terms, following, state.recorded),) if following < terms.steps else ()
    lanes = tuple(
        replace(lane, version=version, sent_version=version, trained=())
        if lane.helper or terms.colocated
        else lane
        for lane in state.lanes
    )
    if terms.shares_work:
        lanes = tuple(replace(lane, taken=lane.taken_ahead, taken_ahead=0) for lane in lanes)
    state = replace(state, committed=version, steps=(*state.steps[1:], *opened), lanes=lanes)
    state, abandoned = abandon_if_unservable(state, at_ns)
    if terms.evaluates(version):
        state = replace(state, evaluations=(*state.evaluations, fresh_evaluation(terms, version)))
    state, encoding = encode_step(state, following, at_ns)
    state, published = publish_newest(state, at_ns)
    if terms.saves(version):
        state, next_job = give_trainer(state, at_ns, Save, version)
    else:
        state, next_job = _generate_if_colocated(state, at_ns)
    return state, (*abandoned, *encoding, *published, *next_job)


def absorb_saved(state: SchedulerState, event: Saved) -> Outcome:
    """The version is in a checkpoint."""
    state = replace(free_trainer(state, event), saved=event.job.step)
    return (state, ()) if state.stopping else _generate_if_colocated(state, event.at_ns)


def absorb_role_switched(state: SchedulerState, event: RoleSwitched) -> Outcome:
    """The trainer is free, or its lanes generate from the next tick on."""
    if event.job.role == "train":
        return free_trainer(state, event), ()
    trainer = state.trainer
    assert isinstance(trainer, SwitchingIn) and trainer.job == event.job, f"{event} answers no job it holds"
    plan = trainer.plan
    return replace(state, trainer=Generating() if plan is None else BetweenRounds(plan, rounds_done=0)), ()


def absorb_restored(state: SchedulerState, event: Restored) -> Outcome:
    """The replacement trainer exports the version again: the old export may be lost with the old trainer."""
    trainer = state.trainer
    assert isinstance(trainer, Restoring) and trainer.job == event.job, f"{event} answers no job that was issued"
    state, job = issue(state, event.at_ns, Export, state.committed)
    return replace(state, trainer=Restoring(job, trainer.saves), exporting=job), (job,)


def absorb_exported(state: SchedulerState, event: Exported) -> Outcome:
    """The weights can be loaded again by lanes that lack them."""
    if state.exporting != event.job:
        return state, ()
    trainer = state.trainer
    restored = isinstance(trainer, Restoring)
    state = replace(state, exporting=None, trainer=Free() if restored else trainer)
    state, published = publish_newest(state, event.at_ns)
    if isinstance(trainer, Restoring) and trainer.saves:
        state, saving = give_trainer(state, event.at_ns, Save, state.committed)
        return state, (*published, *saving)
    return state, published


# --- Decisions -------------------------------------------------------------------------------------------------


def _direct_free_trainer(state: SchedulerState, at_ns: int) -> Outcome:
    step = state.current
    if step.untrained_groups == 0:
        if awaits_publication(state):
            return state, ()
        return give_trainer(state, at_ns, Commit, step.index)
    if step.ready:
        unit = step.ready[0]
        state = put_step(state, replace(step, ready=step.ready[1:]))
        return give_trainer(state, at_ns, Train, Slice(step.index, unit.group, unit.first, unit.size))
    if state.terms.colocated:  # a slice was lost and has to be generated again
        return _switch_to_generating(state, None, at_ns)
    return _help_or_wait(state, at_ns)


def _generate_if_colocated(state: SchedulerState, at_ns: int) -> Outcome:
    """Colocated, the cards generate the next step, or evaluate the last version."""
    if not state.terms.colocated or (state.all_committed and not state.evaluations):
        return state, ()
    return _switch_to_generating(state, None, at_ns)


def _switch_to_generating(state: SchedulerState, plan: HelpPlan | None, at_ns: int) -> Outcome:
    state, job = issue(state, at_ns, SwitchRole, "generate")
    return replace(state, trainer=SwitchingIn(job, plan)), (job,)


def _evaluating(state: SchedulerState) -> bool:
    return any(not evaluation.sampled for evaluation in state.evaluations)


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
    """A bubble: one decision when it opens, if there is a slice that the trainer may start."""
    assert isinstance(state.trainer, Free)
    if state.trainer.bubble_decided or state.terms.help == "none" or not state.helpers:
        return state, ()
    if not SlicePicker(state).may_start(state.committed):
        return replace(state, trainer=Free(bubble_decided=True)), ()
    plan, bubble_plan = choose_help(state, at_ns)
    state = replace(state, bubble_plan=bubble_plan)
    if plan is None:
        return replace(state, trainer=Free(bubble_decided=True)), (Wait(),)
    return _switch_to_generating(state, plan, at_ns)


def _next_round_or_return(state: SchedulerState, between: BetweenRounds, at_ns: int) -> Outcome:
    """Starts another round if the plan asks for one and a slice may start, or returns to training."""
    plan, picker = between.plan, SlicePicker(state)
    wanted = plan.wants_round(between.rounds_done, bool(state.current.ready)) and bool(state.helpers)
    if wanted and picker.may_start(state.committed, plan.current_step_only):
        state, jobs = issue_slices(state, picker, take_from_front(state, picker, state.helpers), at_ns)
        return replace(state, trainer=Helping(plan, between.rounds_done + 1)), jobs
    return give_trainer(state, at_ns, SwitchRole, "train")
