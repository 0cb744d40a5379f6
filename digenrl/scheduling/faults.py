"""Lost lanes, failed jobs, lost artifacts: nothing is dropped, nothing is used twice.

What was lost or failed is issued again under a new job id. A sample is a function of its id, so issuing it again
is all that recovery takes. A group with a sample that cannot be generated or scored is quarantined as a whole,
and a fresh group takes its place in the step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from digenrl.records import (
    Action,
    ArtifactLost,
    Commit,
    Evaluate,
    Export,
    Generate,
    GiveUp,
    HeldOutChunk,
    JobFailed,
    LaneJob,
    Publish,
    Quarantine,
    Restore,
    Save,
    Score,
    Slice,
    TakeUpdate,
    Train,
    WorkerLost,
    holding_lane,
)
from digenrl.scheduling import evaluation, hedging, shared_gradients
from digenrl.scheduling.changes import replace
from digenrl.scheduling.encoding import encode
from digenrl.scheduling.lanes import end_round_if_over, release
from digenrl.scheduling.order import positions, positions_of_group, slices_in, slices_of_group
from digenrl.scheduling.repeated_steps import recorded_as_stale
from digenrl.scheduling.scoring import end_score, ready_again, start_scoring
from digenrl.scheduling.state import (
    Busy,
    Free,
    GroupProgress,
    Outcome,
    ReadyUnit,
    Restoring,
    SchedulerState,
    StepProgress,
    issue,
    open_step,
    put_group,
    put_lane,
    put_step,
    reconsider_help,
)
from digenrl.scheduling.terms import Terms

# --- Lost workers ----------------------------------------------------------------------------------------------


def absorb_lost(state: SchedulerState, event: WorkerLost) -> Outcome:
    """Whatever the worker held is issued again."""
    if event.pool == "reward":
        return _lose_scorer(state, event.lane, event.at_ns)
    if event.pool == "trainer":
        return _lose_trainer(state, event.at_ns)
    if event.pool == "encoder":
        jobs = state.encoding
        prompts = [(job.step, group) for job in jobs for group in job.groups]
        return encode(replace(state, encoding=()), prompts, event.at_ns)
    return _lose_generator(state, event)


def _lose_generator(state: SchedulerState, event: WorkerLost) -> Outcome:
    """The lane is out. A trainer that chose to wait may have counted on it, so it decides again."""
    lane = state.lanes[event.lane]
    if lane.index not in state.present:
        return state, ()
    state = put_lane(state, replace(lane, job=None))
    if lane.trained:
        state = shared_gradients.return_gradients(state, lane, event.at_ns)
    state = replace(
        state,
        present=tuple(index for index in state.present if index != lane.index),
        idle=tuple(index for index in state.idle if index != lane.index),
        helpers=tuple(index for index in state.helpers if index != lane.index),
        uncalibrated=tuple(index for index in state.uncalibrated if index != lane.index),
    )
    state = reconsider_help(return_job(state, lane.job, event.at_ns))
    return evaluation.abandon_if_unservable(state, event.at_ns)


def _lose_scorer(state: SchedulerState, scorer: int, at_ns: int) -> Outcome:
    """Its samples go back to the front of the queue."""
    held = state.scorers[scorer]
    state = replace(state, absent_scorers=state.absent_scorers | {scorer})
    if held is not None:
        state, wanted = end_score(state, held)
        state = replace(state, unscored=(held.piece, *state.unscored)) if wanted else state
    return start_scoring(state, at_ns)


def _lose_trainer(state: SchedulerState, at_ns: int) -> Outcome:
    """A replacement restores the last version. The open step is trained again from the beginning.

    Nothing of a step is in the weights before its commit, so nothing is trained twice.
    """
    for lane in state.lanes:
        if lane.job is not None and (lane.helper or state.terms.colocated):
            state = return_job(release(state, lane.index), lane.job, at_ns)
    state = shared_gradients.lose_trainers_gradients(state, at_ns)
    if state.steps and not state.terms.shares_work:
        step = state.current
        groups = tuple(replace(group, trained=0) for group in step.groups)
        step = replace(step, groups=groups, untrained_groups=state.terms.prompts)
        state = put_step(state, replace(step, ready=ready_again(state.terms, step, at_ns)))
    trainer = state.trainer
    saved = isinstance(trainer, Busy) and isinstance(trainer.job, Save)
    saves = saved or (isinstance(trainer, Restoring) and trainer.saves)
    state, job = issue(replace(state, exporting=None), at_ns, Restore, state.committed)
    return replace(state, trainer=Restoring(job, saves)), (job,)


# --- Failed jobs -----------------------------------------------------------------------------------------------


def absorb_failed(state: SchedulerState, event: JobFailed) -> Outcome:
    """A slice is tried again a few times; a failed reward quarantines its group; an evaluation is abandoned."""
    job = event.job
    if isinstance(job, Generate):
        return _slice_failed(state, job, event)
    if isinstance(job, Evaluate):
        if state.lanes[job.lane].job != job:
            return state, ()
        return evaluation.abandon(release(state, job.lane), job.chunk.version, event.reason, event.at_ns)
    assert isinstance(job, Score), f"{job} failed, which ends a run: {event.reason}"
    return _score_failed(state, job, event)


def _slice_failed(state: SchedulerState, job: Generate, event: JobFailed) -> Outcome:
    if state.lanes[job.lane].job != job:
        return state, ()
    state, is_alone = hedging.drop_job(release(state, job.lane), job)
    step = open_step(state, job.slice.step)
    if step is None or not is_alone:
        return state, ()  # its copy carries on, or its group is quarantined and its step committed by now
    group = step.groups[job.slice.group]
    failures = group.failures + 1
    state = put_step(
        state, replace(step, groups=put_group(step, job.slice.group, replace(group, failures=failures)))
    )
    state = reissue(state, job.slice)
    if failures < state.terms.slice_failures_per_group:
        return state, ()
    return quarantine(state, job.slice, event.reason, event.at_ns)


def _score_failed(state: SchedulerState, job: Score, event: JobFailed) -> Outcome:
    """A failed reward is never a number."""
    if state.scorers[job.scorer] != job:
        return state, ()
    state, wanted = end_score(state, job)
    actions: tuple[Action, ...] = ()
    if wanted and isinstance(job.piece, HeldOutChunk):
        state, actions = evaluation.abandon(state, job.piece.version, event.reason, event.at_ns)
    elif wanted and isinstance(job.piece, Slice):
        state, actions = quarantine(state, job.piece, event.reason, event.at_ns)
    state, more = start_scoring(state, event.at_ns)
    return state, (*actions, *more)


# --- Lost artifacts --------------------------------------------------------------------------------------------


def absorb_artifact_lost(state: SchedulerState, event: ArtifactLost) -> Outcome:
    """The job is open again, and what it read is made again: slices, encoded prompts, exported weights."""
    state, is_news = _take_back(state, event)
    if is_news:
        for piece in event.slices:
            state = _forget_slice(state, piece)
    state, encoding = encode(state, event.prompts, event.at_ns)
    exporting: tuple[Action, ...] = ()
    if event.weights and state.exporting is None and not isinstance(state.trainer, Restoring):
        state, export = issue(state, event.at_ns, Export, state.committed)
        state, exporting = replace(state, exporting=export), (export,)
    state, scoring = start_scoring(state, event.at_ns)
    state, abandoned = evaluation.abandon_if_unservable(state, event.at_ns)
    return state, (*encoding, *exporting, *scoring, *abandoned)


def _take_back(state: SchedulerState, event: ArtifactLost) -> tuple[SchedulerState, bool]:
    """The worker is free and its work is open again.

    Also returns whether the loss of slices is news. It is not if the job is late, or void because another job
    has reported the loss.
    """
    job = event.job
    lane = holding_lane(job)
    if lane is not None:
        if state.lanes[lane].job != job:
            return state, False
        return return_job(release(state, lane), job, event.at_ns), True
    if isinstance(job, Commit | TakeUpdate):
        return shared_gradients.lose_sent_gradients(state, event.gradients, event.at_ns), True
    if isinstance(job, Score):
        return _take_back_score(state, job)
    if isinstance(job, Train):
        return _take_back_train(state, job, event.at_ns)
    if isinstance(job, Publish):
        lanes = list(state.lanes)
        for index in job.lanes:
            if lanes[index].sent_version == job.version:
                lanes[index] = replace(lanes[index], sent_version=lanes[index].version)
        return replace(state, lanes=tuple(lanes)), True
    raise AssertionError(f"{job} reads no artifact that can be made again")


def _take_back_score(state: SchedulerState, job: Score) -> tuple[SchedulerState, bool]:
    if state.scorers[job.scorer] != job:
        return state, False
    state, wanted = end_score(state, job)
    if not wanted:
        return state, False
    if isinstance(job.piece, HeldOutChunk):
        return evaluation.return_chunk(state, job.piece, sampled=True), True
    return replace(state, unscored=(job.piece, *state.unscored)), True


def _take_back_train(state: SchedulerState, job: Train, at_ns: int) -> tuple[SchedulerState, bool]:
    assert state.trainer == Busy(job), f"{job} was not issued"
    step, piece = state.current, job.slice
    group, state = step.groups[piece.group], replace(state, trainer=Free())
    still_scored = group.scored & piece.mask() == piece.mask() and not group.retired
    if still_scored and not (state.terms.stream == "batch" and step.unscored_groups):
        unit = ReadyUnit(at_ns, piece.group, piece.first, piece.size)
        state = put_step(state, replace(step, ready=tuple(sorted((*step.ready, unit)))))
    return state, True


def _forget_slice(state: SchedulerState, piece: Slice) -> SchedulerState:
    """A generated slice is lost: it is generated and scored again, unless another job has reported the loss."""
    terms, step = state.terms, open_step(state, piece.step)
    assert terms.stream != "sample", "single samples are streamed in simulations only, where nothing is lost"
    if step is None or step.groups[piece.group].retired:
        return state
    group = step.groups[piece.group]
    was_complete = group.scored == (1 << terms.samples_per_prompt) - 1
    ready = tuple(unit for unit in step.ready if unit.group != piece.group)
    if terms.stream == "batch" and was_complete:
        ready = ()
    step = replace(
        step,
        groups=put_group(step, piece.group, replace(group, scored=group.scored & ~piece.mask())),
        ready=ready,
        unscored_groups=step.unscored_groups + was_complete,
    )
    void = {job.id for job in state.scorers if job is not None and _share_samples(job.piece, piece)}
    waiting = tuple(each for each in state.unscored if not _share_samples(each, piece))
    awaited = _awaited(state, step)
    state = replace(put_step(state, step), unscored=waiting, void_scores=state.void_scores | void)
    for each in slices_in(terms, piece):
        if not any(_share_samples(other, each) for other in awaited):
            state = reissue(state, each)
    return state


def _awaited(state: SchedulerState, step: StepProgress) -> list[Slice]:
    """What lanes are generating, and what waits to be generated again."""
    jobs = [lane.job for lane in state.present_lanes if isinstance(lane.job, Generate)]
    return [*step.reissue, *(job.slice for job in jobs if job.id not in state.void_jobs)]


def _share_samples(piece: Slice | HeldOutChunk, other: Slice) -> bool:
    if not isinstance(piece, Slice):
        return False
    return (piece.step, piece.group) == (other.step, other.group) and bool(piece.mask() & other.mask())


# --- Issuing again ---------------------------------------------------------------------------------------------


def return_job(state: SchedulerState, job: LaneJob | None, at_ns: int) -> SchedulerState:
    """What a lane held is open again."""
    state = end_round_if_over(state)
    if isinstance(job, Generate):
        state, is_alone = hedging.drop_job(state, job)
        return reissue(state, job.slice) if is_alone else state
    if isinstance(job, Train):
        return shared_gradients.return_training(state, job, at_ns)
    return evaluation.return_chunk(state, job.chunk, sampled=False) if isinstance(job, Evaluate) else state


def reissue(state: SchedulerState, piece: Slice) -> SchedulerState:
    """Puts the slices of a job back into the step's list, before everything that was never started.

    Their share of the stale budget is returned, and charged again by the version that they are issued on next.
    """
    step = open_step(state, piece.step)
    if step is None or step.groups[piece.group].retired:
        return state
    waiting = list(step.reissue)
    for each in slices_in(state.terms, piece):
        insort(waiting, each, key=_order_of_reissue(state.terms, step))
    state = put_step(state, replace(step, reissue=tuple(waiting)))
    return reconsider_help(return_stale_samples(state, piece))


def _order_of_reissue(terms: Terms, step: StepProgress) -> Callable[[Slice], tuple[bool, int]]:
    """By position, but first those that a resumed run repeats with the version one behind."""
    position = positions(terms)
    return lambda piece: (not recorded_as_stale(step, piece), position(piece))


def return_stale_samples(state: SchedulerState, piece: Slice) -> SchedulerState:
    """Those of the samples that count as stale do not any more."""
    step = open_step(state, piece.step)
    assert step is not None
    group = step.groups[piece.group]
    returned = group.stale & piece.mask()
    if not returned:
        return state
    groups = put_group(step, piece.group, replace(group, stale=group.stale & ~returned))
    return put_step(state, replace(step, groups=groups, stale_samples=step.stale_samples - returned.bit_count()))


def quarantine(state: SchedulerState, piece: Slice, reason: str, at_ns: int) -> Outcome:
    """Retires a group with all its samples and appends a fresh one to its step."""
    terms, step = state.terms, open_step(state, piece.step)
    if step is None or step.groups[piece.group].retired:
        return state, ()
    if len(step.groups) - terms.prompts >= terms.replacements_per_step:
        return state, (GiveUp(f"{terms.replacements_per_step} groups of step {step.index} failed: {reason}"),)
    old, replaced_by = step.groups[piece.group], len(step.groups)
    if terms.shares_work and old.trained | old.training:  # a lost slice was generated again but cannot be scored
        name = f"group {piece.group} of step {step.index}"
        return state, (GiveUp(f"{name} failed when it was partly trained: {reason}"),)
    was_complete = old.scored == (1 << terms.samples_per_prompt) - 1
    assert old.trained.bit_count() < terms.samples_per_prompt, f"{piece} failed after its group was trained"
    fresh_slices = slices_of_group(terms, step.index, replaced_by)
    step = replace(
        step,
        reissue=tuple(
            sorted(
                (*(each for each in step.reissue if each.group != piece.group), *fresh_slices),
                key=_order_of_reissue(terms, step),
            )
        ),
        groups=(
            *put_group(step, piece.group, replace(old, retired=True, stale=0)),
            GroupProgress(place=step.place(piece.group)),
        ),
        ready=tuple(unit for unit in step.ready if unit.group != piece.group),
        unscored_groups=step.unscored_groups + was_complete,
        stale_samples=step.stale_samples - old.stale.bit_count(),
        ahead=_with_retired(terms, step, piece.group),
    )
    state = reconsider_help(put_step(state, step))
    waiting = tuple(
        each
        for each in state.unscored
        if not isinstance(each, Slice) or (each.step, each.group) != (piece.step, piece.group)
    )
    state, encoding = encode(replace(state, unscored=waiting), ((step.index, replaced_by),), at_ns)
    return state, (Quarantine(step.index, piece.group, replaced_by, reason), *encoding)


def _with_retired(terms: Terms, step: StepProgress, group: int) -> tuple[int, ...]:
    """The positions that are not handed out any more, those of a retired group included."""
    if group >= terms.prompts:
        return step.ahead  # a replacement: its slices never were in the list
    retired = (position for position in positions_of_group(terms, group) if position >= step.cursor)
    return tuple(sorted({*step.ahead, *retired}))
