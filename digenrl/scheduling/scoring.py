"""From a generated slice to samples that may be trained: the score queue, and when a group is ready."""

from __future__ import annotations

from bisect import insort

from digenrl.records import Action, HeldOutChunk, Score, Scored, Slice, WorkerRestarted
from digenrl.scheduling.changes import replace
from digenrl.scheduling.state import (
    GroupProgress,
    Outcome,
    ReadyUnit,
    SchedulerState,
    StepProgress,
    find_evaluation,
    is_wanted,
    open_step,
    put_evaluation,
    put_group,
    put_step,
)
from digenrl.scheduling.terms import Terms


def enqueue(state: SchedulerState, piece: Slice | HeldOutChunk, at_ns: int) -> Outcome:
    """Sends generated samples to the reward lanes. Without any, the generator has scored them."""
    if not state.scorers:
        assert isinstance(piece, Slice)
        return mark_scored(state, piece, at_ns), ()
    return start_scoring(replace(state, unscored=(*state.unscored, piece)), at_ns)


def start_scoring(state: SchedulerState, at_ns: int) -> Outcome:
    """Every idle reward lane takes the oldest waiting samples: a chunk, or a batch of one slice."""
    if not state.unscored or None not in state.scorers:
        return state, ()
    scorers, waiting = list(state.scorers), list(state.unscored)
    jobs: list[Action] = []
    for scorer, held in enumerate(scorers):
        if held is not None or scorer in state.absent_scorers or not waiting:
            continue
        oldest = waiting.pop(0)
        if isinstance(oldest, Slice) and oldest.size > state.terms.score_batch:
            taken = state.terms.score_batch
            waiting.insert(0, replace(oldest, first=oldest.first + taken, size=oldest.size - taken))
            oldest = replace(oldest, size=taken)
        job = Score(state.jobs_issued + len(jobs), at_ns, oldest, scorer)
        scorers[scorer] = job
        jobs.append(job)
    state = replace(
        state, scorers=tuple(scorers), unscored=tuple(waiting), jobs_issued=state.jobs_issued + len(jobs)
    )
    return state, tuple(jobs)


def end_score(state: SchedulerState, job: Score) -> tuple[SchedulerState, bool]:
    """Takes the job from its reward lane. Also returns whether its samples still have to be scored."""
    wanted = job.id not in state.void_scores and is_wanted(state, job.piece)
    state = replace(
        state,
        scorers=(*state.scorers[: job.scorer], None, *state.scorers[job.scorer + 1 :]),
        void_scores=state.void_scores - {job.id},
    )
    return state, wanted


def absorb_scored(state: SchedulerState, event: Scored) -> Outcome:
    """The reward lane takes the next samples."""
    job, piece = event.job, event.job.piece
    if state.scorers[job.scorer] != job:
        return state, ()
    state, wanted = end_score(state, job)
    if wanted and isinstance(piece, Slice):
        state = mark_scored(state, piece, event.at_ns)
    elif wanted and isinstance(piece, HeldOutChunk):
        evaluation = find_evaluation(state, piece.version)
        assert evaluation is not None
        state = put_evaluation(state, replace(evaluation, unscored=evaluation.unscored - 1))
    return start_scoring(state, event.at_ns)


def absorb_restarted(state: SchedulerState, event: WorkerRestarted) -> Outcome:
    """The reward lane takes jobs again."""
    assert event.pool == "reward", f"{event}: only reward lanes restart in place"
    return start_scoring(replace(state, absent_scorers=state.absent_scorers - {event.lane}), event.at_ns)


def mark_scored(state: SchedulerState, piece: Slice, at_ns: int) -> SchedulerState:
    """The samples are scored. What becomes ready joins the trainer's queue."""
    step = open_step(state, piece.step)
    assert step is not None
    terms, group = state.terms, step.groups[piece.group]
    assert not group.scored & piece.mask(), f"{piece} was scored twice"
    group = replace(group, scored=group.scored | piece.mask())
    complete = group.scored == (1 << terms.samples_per_prompt) - 1
    unscored_groups = step.unscored_groups - complete
    step = replace(step, groups=put_group(step, piece.group, group), unscored_groups=unscored_groups)
    units = _newly_ready(terms, step, piece, complete, at_ns)
    if units:
        ready = list(step.ready)
        for unit in units:
            insort(ready, unit)
        step = replace(step, ready=tuple(ready))
    return put_step(state, step)


def _newly_ready(
    terms: Terms, step: StepProgress, piece: Slice, group_complete: bool, at_ns: int
) -> list[ReadyUnit]:
    """Samples as they are scored, groups as they complete, or all groups once the step is scored.

    Some may be trained already, if a slice was lost after the step had been scored.
    """
    if terms.stream == "sample":
        return [ReadyUnit(at_ns, piece.group, sample.index, 1) for sample in piece.samples()]
    if terms.stream == "group" and group_complete:
        return _units(terms, piece.group, step.groups[piece.group], at_ns)
    if terms.stream == "batch" and step.unscored_groups == 0:
        return [unit for index, group in _kept_groups(step) for unit in _units(terms, index, group, at_ns)]
    return []


def _units(terms: Terms, index: int, group: GroupProgress, at_ns: int) -> list[ReadyUnit]:
    """What is left to train of a complete group."""
    size, taken = terms.train_unit, group.trained | group.training
    firsts = range(0, terms.samples_per_prompt, size)
    return [ReadyUnit(at_ns, index, first, size) for first in firsts if not taken >> first & 1]


def ready_again(terms: Terms, step: StepProgress, at_ns: int) -> tuple[ReadyUnit, ...]:
    """Everything that is scored, ready to be trained from the beginning: the trainer's gradient was lost."""
    whole = terms.samples_per_prompt
    if terms.stream == "sample":
        return tuple(
            ReadyUnit(at_ns, index, sample, 1)
            for index, group in _kept_groups(step)
            for sample in range(whole)
            if group.scored >> sample & 1
        )
    if terms.stream == "batch" and step.unscored_groups:
        return ()
    complete = [(index, group) for index, group in _kept_groups(step) if group.scored.bit_count() == whole]
    return tuple(unit for index, group in complete for unit in _units(terms, index, group, at_ns))


def _kept_groups(step: StepProgress) -> list[tuple[int, GroupProgress]]:
    return [(index, group) for index, group in enumerate(step.groups) if not group.retired]
