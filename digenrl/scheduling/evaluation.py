"""Evaluation: held-out prompts are sampled in chunks by idle generator lanes that serve the version.

Chunks go before slices. The next version is not published before all chunks of this one are sampled, so every
chunk is sampled with the version it is about. And a version to be evaluated is published before the next commit.
"""

from __future__ import annotations

from digenrl.records import AbandonEvaluation, Action, Evaluate, Evaluated, HeldOutChunk
from digenrl.scheduling.changes import replace
from digenrl.scheduling.lanes import publish_newest, release
from digenrl.scheduling.repeated_steps import is_served
from digenrl.scheduling.scoring import enqueue
from digenrl.scheduling.state import (
    Outcome,
    SchedulerState,
    find_evaluation,
    give_lanes,
    is_available,
    put_evaluation,
)


def awaits_publication(state: SchedulerState) -> bool:
    """Whether the newest version is to be evaluated and has not been sent to any generator lane yet."""
    evaluation = find_evaluation(state, state.committed)
    if evaluation is None or state.terms.colocated:
        return False
    generators = [lane for lane in state.present_lanes if not lane.helper]
    return bool(generators) and all(lane.sent_version != evaluation.version for lane in generators)


def hand_out_chunks(state: SchedulerState, at_ns: int) -> Outcome:
    """Gives chunks to the idle lanes that serve the version."""
    handed_out: list[Action] = []
    for evaluation in state.evaluations:
        able = [
            index
            for index in state.idle
            if state.lanes[index].version == state.lanes[index].sent_version == evaluation.version
            and is_available(state, state.lanes[index])
        ]
        pairs = zip(able, evaluation.unstarted, strict=False)
        jobs = [
            Evaluate(job_id, at_ns, HeldOutChunk(evaluation.version, chunk), index)
            for job_id, (index, chunk) in enumerate(pairs, start=state.jobs_issued)
        ]
        if jobs:
            left, sampling = evaluation.unstarted[len(jobs) :], evaluation.sampling + len(jobs)
            begun = replace(evaluation, unstarted=left, sampling=sampling)
            state = put_evaluation(give_lanes(state, jobs), begun)
            handed_out += jobs
    return state, tuple(handed_out)


def absorb_evaluated(state: SchedulerState, event: Evaluated) -> Outcome:
    """The lane is idle again. The chunk waits for a reward lane, unless generators score."""
    job = event.job
    if state.lanes[job.lane].job != job:
        return state, ()
    state = release(state, job.lane)
    evaluation = find_evaluation(state, job.chunk.version)
    if evaluation is None:
        return state, ()
    evaluation = replace(
        evaluation, sampling=evaluation.sampling - 1, unscored=evaluation.unscored + bool(state.scorers)
    )
    state = put_evaluation(state, evaluation)
    actions: tuple[Action, ...] = ()
    if state.scorers:
        state, actions = enqueue(state, job.chunk, event.at_ns)
    state, published = publish_newest(state, event.at_ns)
    return state, (*actions, *published)


def return_chunk(state: SchedulerState, chunk: HeldOutChunk, *, sampled: bool) -> SchedulerState:
    """The chunk was lost, by its lane or after it was `sampled`: it is to be sampled again."""
    evaluation = find_evaluation(state, chunk.version)
    if evaluation is None:
        return state
    return put_evaluation(
        state,
        replace(
            evaluation,
            unstarted=tuple(sorted((*evaluation.unstarted, chunk.index))),
            sampling=evaluation.sampling - (not sampled),
            unscored=evaluation.unscored - sampled,
        ),
    )


def abandon(state: SchedulerState, version: int, reason: str, at_ns: int) -> Outcome:
    """Drops the evaluation of a version. What lanes are still doing for it is ignored."""
    if find_evaluation(state, version) is None:
        return state, ()
    waiting = tuple(
        each for each in state.unscored if not (isinstance(each, HeldOutChunk) and each.version == version)
    )
    left = tuple(each for each in state.evaluations if each.version != version)
    state, published = publish_newest(replace(state, evaluations=left, unscored=waiting), at_ns)
    return state, (AbandonEvaluation(version, reason), *published)


def abandon_if_unservable(state: SchedulerState, at_ns: int) -> Outcome:
    """Drops evaluations of older versions that no generator lane will serve again."""
    actions: tuple[Action, ...] = ()
    for version in [each.version for each in state.evaluations if each.unstarted]:
        if version < state.committed and not is_served(state, version):
            state, abandoned = abandon(state, version, "no lane is left that serves this version", at_ns)
            actions += abandoned
    return state, actions
