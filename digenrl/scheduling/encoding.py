"""Which prompts are encoded when: those of a step before it opens, and those of groups that were added or lost."""

from __future__ import annotations

from collections.abc import Sequence

from digenrl.records import Action, Encode
from digenrl.scheduling.changes import replace
from digenrl.scheduling.state import Outcome, SchedulerState, issue


def encode(state: SchedulerState, prompts: Sequence[tuple[int, int]], at_ns: int) -> Outcome:
    """Encode jobs for the prompts of these (step, group) pairs that are not being encoded, one per step."""
    if not state.terms.encodes:
        return state, ()
    missing = set(prompts) - {(job.step, group) for job in state.encoding for group in job.groups}
    jobs: list[Action] = []
    for step in sorted({step for step, _ in missing}):
        groups = tuple(sorted(group for of_step, group in missing if of_step == step))
        state, job = issue(state, at_ns, Encode, step, groups)
        state = replace(state, encoding=(*state.encoding, job))
        jobs.append(job)
    return state, tuple(jobs)


def encode_step(state: SchedulerState, step: int, at_ns: int) -> Outcome:
    """Encode jobs for the prompts of a step that opens next, unless there is none or they were issued before."""
    if not state.encoded_steps <= step < state.terms.steps:
        return state, ()
    groups = range(state.terms.prompts)
    return encode(replace(state, encoded_steps=step + 1), [(step, group) for group in groups], at_ns)
