"""From a finished slice to samples that may be trained: the score queue, and when a group is ready."""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from digenrl.records import Action, SamplesScored, Score, Slice
from digenrl.scheduling.state import (
    GroupProgress,
    ReadyUnit,
    SchedulerState,
    ScoringJob,
    StepProgress,
    open_step,
    put_group,
    put_step,
)
from digenrl.scheduling.terms import Terms

INSTANT_SCORER = -1


def enqueue(state: SchedulerState, piece: Slice, at_ns: int) -> tuple[SchedulerState, tuple[Action, ...]]:
    """Sends a generated slice to be scored: at once, or batch by batch as reward lanes become free."""
    if not state.scorers:
        return state, (Score(piece, INSTANT_SCORER),)
    return start_scoring(replace(state, unscored=(*state.unscored, piece)), at_ns)


def start_scoring(state: SchedulerState, at_ns: int) -> tuple[SchedulerState, tuple[Action, ...]]:
    """Every free reward lane takes the oldest sample that waits, or a batch of its slice from there on."""
    if not state.unscored or None not in state.scorers:
        return state, ()
    scorers, waiting = list(state.scorers), list(state.unscored)
    actions: list[Action] = []
    for scorer, busy_with in enumerate(scorers):
        if busy_with is not None or not waiting:
            continue
        oldest = waiting[0]
        taken = min(state.terms.score_batch, oldest.size)
        batch = replace(oldest, size=taken)
        scorers[scorer] = ScoringJob(batch, at_ns)
        actions.append(Score(batch, scorer))
        if oldest.size == taken:
            waiting.pop(0)
        else:
            waiting[0] = replace(oldest, first=oldest.first + taken, size=oldest.size - taken)
    return replace(state, scorers=tuple(scorers), unscored=tuple(waiting)), tuple(actions)


def awaits_score(state: SchedulerState, scorer: int, piece: Slice) -> bool:
    """Whether this score was asked for and not answered yet; any other answer is late or doubled."""
    if scorer != INSTANT_SCORER:
        held = state.scorers[scorer]
        return held is not None and held.slice == piece
    step = open_step(state, piece.step)
    return step is not None and not step.groups[piece.group].scored & piece.mask()


def free_scorer(state: SchedulerState, scorer: int) -> SchedulerState:
    """Takes what a reward lane holds out of its hands."""
    if scorer == INSTANT_SCORER:
        return state
    scorers = list(state.scorers)
    scorers[scorer] = None
    return replace(state, scorers=tuple(scorers))


def absorb_scores(state: SchedulerState, event: SamplesScored) -> tuple[SchedulerState, tuple[Action, ...]]:
    """Marks samples as scored; what thereby becomes ready joins the trainer's queue."""
    if not awaits_score(state, event.scorer, event.slice):
        return state, ()
    state = free_scorer(state, event.scorer)
    piece = event.slice
    step = open_step(state, piece.step)
    if step is not None and not step.groups[piece.group].retired:
        state = put_step(state, _mark_scored(state.terms, step, piece, event.at_ns))
    return start_scoring(state, event.at_ns)


def _mark_scored(terms: Terms, step: StepProgress, piece: Slice, at_ns: int) -> StepProgress:
    group = step.groups[piece.group]
    assert not group.scored & piece.mask(), f"{piece} was scored twice"
    group = replace(group, scored=group.scored | piece.mask())
    complete = group.scored == (1 << terms.samples_per_prompt) - 1
    unscored_groups = step.unscored_groups - complete
    step = replace(step, groups=put_group(step, piece.group, group), unscored_groups=unscored_groups)
    return replace(step, ready=_with_newly_ready(terms, step, piece, complete, at_ns))


def _with_newly_ready(
    terms: Terms, step: StepProgress, piece: Slice, group_complete: bool, at_ns: int
) -> tuple[ReadyUnit, ...]:
    """Streaming: by sample as it is scored, by group as it completes, or all groups when the step is scored."""
    whole = terms.samples_per_prompt
    if terms.stream == "sample":
        units = [ReadyUnit(at_ns, piece.group, sample.index, 1) for sample in piece.samples()]
    elif terms.stream == "group" and group_complete:
        units = [ReadyUnit(at_ns, piece.group, 0, whole)]
    elif terms.stream == "batch" and step.unscored_groups == 0:
        units = [ReadyUnit(at_ns, index, 0, whole) for index, group in _kept_groups(step)]
    else:
        return step.ready
    ready = list(step.ready)
    for unit in units:
        insort(ready, unit)
    return tuple(ready)


def _kept_groups(step: StepProgress) -> list[tuple[int, GroupProgress]]:
    return [(index, group) for index, group in enumerate(step.groups) if not group.retired]
