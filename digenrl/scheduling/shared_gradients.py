"""The gradient sums of lanes that train on their own: sent when nothing is left to train, committed, or lost.

A step has one or several optimizer updates. The samples of an update are trained by any lanes, each of which keeps
its sums until no sample of the update is left to be handed out. When all sums are sent, the trainer adds them and
takes the update. Its own lanes keep their sums, and must be idle then. The last update of a step is its commit.

If the trainer is lost after a step's first update, the step is trained once more from the version's weights, in a
new attempt. What lanes still do for the old one is ignored.
"""

from __future__ import annotations

from digenrl.records import (
    Action,
    Commit,
    GradientsSent,
    SendGradients,
    Slice,
    TakeUpdate,
    Train,
    Trained,
    UpdateTaken,
)
from digenrl.scheduling.changes import replace
from digenrl.scheduling.encoding import encode_step
from digenrl.scheduling.evaluation import awaits_publication
from digenrl.scheduling.lanes import release
from digenrl.scheduling.scoring import ready_again
from digenrl.scheduling.state import (
    Free,
    Lane,
    Outcome,
    ReadyUnit,
    SchedulerState,
    SentGradients,
    free_trainer,
    give_trainer,
    issue,
    open_step,
    put_group,
    put_lane,
    put_step,
)

# --- Decisions -------------------------------------------------------------------------------------------------


def send_gradients(state: SchedulerState, at_ns: int) -> Outcome:
    """Idle lanes send their sums as soon as no sample of the update is left to be handed out for training.

    From then on they wait for the next step: a good time to encode the prompts of the step after it.
    """
    step = state.current
    if step.untrained_samples > sum(_samples_in_training(state, lane) for lane in state.present_lanes):
        return state, ()
    jobs: list[Action] = []
    if state.idle and step.update == state.terms.updates - 1:
        state, encoding = encode_step(state, step.index + 2, at_ns)
        jobs.extend(encoding)
    for index in state.idle:
        lane = state.lanes[index]
        if lane.trained and not lane.helper:
            state, job = issue(state, at_ns, SendGradients, step.index, index, step.attempt)
            state = put_lane(state, replace(lane, job=job, ends_ns=at_ns + state.costs.send_ns))
            jobs.append(job)
    if jobs:
        state = replace(state, idle=tuple(index for index in state.idle if state.lanes[index].job is None))
    return state, tuple(jobs)


def _samples_in_training(state: SchedulerState, lane: Lane) -> int:
    job = lane.job
    return job.slice.size if isinstance(job, Train) and _is_open(state, job.slice.step, job.attempt) else 0


def _is_open(state: SchedulerState, step: int, attempt: int) -> bool:
    """Whether the open step is in this attempt. A slow lane may still train an older one, or an older step."""
    return bool(state.steps) and (state.current.index, state.current.attempt) == (step, attempt)


def commit_if_complete(state: SchedulerState, at_ns: int) -> Outcome:
    """Takes the update whose gradients are complete: the step's last one is its commit."""
    step, terms = state.current, state.terms
    if step.untrained_samples or not isinstance(state.trainer, Free):
        return state, ()
    if any(lane.job is not None if lane.helper else lane.trained for lane in state.present_lanes):
        return state, ()
    sent = tuple(each.job.id for each in step.gradients)
    if step.update < terms.updates - 1:
        if terms.updates_need_all_rewards and step.unscored_groups:
            return state, ()
        return give_trainer(state, at_ns, TakeUpdate, step.index, step.update, sent)
    if awaits_publication(state):
        return state, ()
    return give_trainer(state, at_ns, Commit, step.index, sent)


# --- Results ---------------------------------------------------------------------------------------------------


def absorb_trained(state: SchedulerState, event: Trained) -> Outcome:
    """The lane holds the gradient of these samples, until it sends its sums."""
    job, piece = event.job, event.job.slice
    lane = state.lanes[job.lane]
    if lane.job != job:
        return state, ()  # late: the lane is lost
    if not _is_open(state, piece.step, job.attempt):
        return release(state, lane.index), ()
    state = release(state, lane.index, trained=(*lane.trained, piece))
    step = state.current
    group = step.groups[piece.group]
    assert not group.trained & piece.mask(), f"{piece} was trained twice"
    group = replace(group, trained=group.trained | piece.mask(), training=group.training & ~piece.mask())
    complete = group.trained.bit_count() == state.terms.samples_per_prompt
    step = replace(
        step,
        groups=put_group(step, piece.group, group),
        untrained_groups=step.untrained_groups - complete,
        untrained_samples=step.untrained_samples - piece.size,
    )
    return put_step(state, step), ()


def absorb_gradients_sent(state: SchedulerState, event: GradientsSent) -> Outcome:
    """The sums are in the exchange, and the lane starts over."""
    job = event.job
    lane = state.lanes[job.lane]
    if lane.job != job:
        return state, ()
    if not _is_open(state, job.step, job.attempt):
        return release(state, lane.index), ()
    state, step = release(state, lane.index, trained=()), state.current
    return put_step(state, replace(step, gradients=(*step.gradients, SentGradients(job, lane.trained)))), ()


def absorb_update_taken(state: SchedulerState, event: UpdateTaken) -> Outcome:
    """The next update is open, and lanes train it with its weights."""
    state = free_trainer(state, event)
    state = replace(state, lanes=tuple(replace(lane, trained=()) for lane in state.lanes))
    return _open_update(state, state.current.update + 1, event.at_ns), ()


def _open_update(state: SchedulerState, update: int, at_ns: int) -> SchedulerState:
    terms, step = state.terms, state.current
    step = replace(step, update=update, untrained_samples=terms.samples_of_update(update), gradients=())
    if not terms.update_of_place or update == 0:
        groups = tuple(replace(group, trained=0, training=0) for group in step.groups)
        step = replace(step, groups=groups, untrained_groups=terms.prompts)
        step = replace(step, ready=ready_again(terms, step, at_ns))
    return put_step(state, step)


# --- Losses ----------------------------------------------------------------------------------------------------


def lose_trainers_gradients(state: SchedulerState, at_ns: int) -> SchedulerState:
    """Losing the trainer loses its own lanes' gradient sums.

    After the first update of a step, it also loses the step's earlier updates.
    """
    if not state.steps:
        return state
    step = state.current
    if step.update == 0:
        for lane in state.lanes:
            if lane.helper and lane.trained:
                state = return_gradients(state, lane, at_ns)
        return state
    state = replace(state, lanes=tuple(replace(lane, trained=()) for lane in state.lanes))
    return _open_update(put_step(state, replace(step, attempt=step.attempt + 1)), 0, at_ns)


def return_gradients(state: SchedulerState, lane: Lane, at_ns: int) -> SchedulerState:
    """The sums that the lane holds are lost: their samples are trained again."""
    state = put_lane(state, replace(state.lanes[lane.index], trained=()))
    return _train_again(state, lane.trained, at_ns)


def lose_sent_gradients(state: SchedulerState, jobs: tuple[int, ...], at_ns: int) -> SchedulerState:
    """Sums in the exchange are lost: their samples are trained again, and the update is not taken yet."""
    step = state.current
    lost = [each for each in step.gradients if each.job.id in jobs]
    kept = tuple(each for each in step.gradients if each.job.id not in jobs)
    state = replace(put_step(state, replace(step, gradients=kept)), trainer=Free())
    return _train_again(state, tuple(piece for each in lost for piece in each.pieces), at_ns)


def return_training(state: SchedulerState, job: Train, at_ns: int) -> SchedulerState:
    """A Train job was not carried out: its samples are ready again, if they are still scored."""
    step = open_step(state, job.slice.step)
    if step is None or job.attempt != step.attempt:
        return state
    return _make_ready(state, job.slice, at_ns)


def _make_ready(state: SchedulerState, piece: Slice, at_ns: int) -> SchedulerState:
    step = state.current
    group = step.groups[piece.group]
    group = replace(group, training=group.training & ~piece.mask())
    step = replace(step, groups=put_group(step, piece.group, group))
    if group.scored == (1 << state.terms.samples_per_prompt) - 1:
        unit = ReadyUnit(at_ns, piece.group, piece.first, piece.size)
        step = replace(step, ready=tuple(sorted((*step.ready, unit))))
    return put_step(state, step)


def _train_again(state: SchedulerState, pieces: tuple[Slice, ...], at_ns: int) -> SchedulerState:
    whole = state.terms.samples_per_prompt
    for piece in pieces:
        step = state.current
        group = step.groups[piece.group]
        was_complete = group.trained.bit_count() == whole
        group = replace(group, trained=group.trained & ~piece.mask())
        step = replace(
            step,
            groups=put_group(step, piece.group, group),
            untrained_groups=step.untrained_groups + was_complete,
            untrained_samples=step.untrained_samples + piece.size,
        )
        state = _make_ready(put_step(state, step), piece, at_ns)
    return state
