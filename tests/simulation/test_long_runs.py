"""Runs of thousands of steps: neither the scheduler's state nor the cost of a decision grows with them."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

import pytest

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.records import NO_JOB, Event, Generate
from digenrl.scheduling import SchedulerState, decide
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from simulation.noisy_cluster import NoisyCluster

STEPS = 120


def long_run(steps: int, help_rule: str, **more: Any) -> SchedulerState:
    content = {
        "steps": steps,
        "prompts": 2,
        "samples_per_prompt": 2,
        "slice": 1,
        "generators": [{"count": 2, "seconds": {1: 1}}],
        "reward": {"lanes": 1, "seconds": 0.1},
        "trainer": {"seconds_per_sample": 0.2, "commit": 0.1, "helper": {"seconds": {1: 1}, "switch_in": 0.1}},
        "publish": 0.3,
        "policy": {"help": help_rule, "stale_fraction": 0.5},
        **more,
    }
    return initial_scheduler_state(parse_model(Spec, content), search_budget=200)


class CallCounter:
    """Counts calls of this package's functions, a measure of work that is the same on every machine.

    Garbage collection may run finalizers of other tests' objects at any time, so it waits.
    """

    def __init__(self) -> None:
        self.calls = 0

    def decided(self, state: SchedulerState, event: Event) -> Any:
        def count(frame: Any, what: str, argument: Any) -> None:
            self.calls += what == "call" and frame.f_globals.get("__name__", "").startswith("digenrl")

        gc.disable()
        sys.setprofile(count)
        try:
            return decide(state, event)
        finally:
            sys.setprofile(None)
            gc.enable()


@pytest.mark.parametrize("help_rule", ["none", "auto"])
def test_state_and_work_of_a_step_do_not_grow_with_the_number_of_steps(help_rule: str) -> None:
    state = long_run(STEPS, help_rule)
    cluster, counter, auditor = VirtualCluster(state), CallCounter(), Auditor(state)
    sizes, calls = [0] * STEPS, [0] * STEPS
    while not state.finished:
        step, event = state.committed, cluster.next_event()
        counter.calls = 0
        state, actions = counter.decided(state, event)
        auditor.observe(event, actions, state)
        for action in actions:
            cluster.submit(action)
        sizes[step] = max(sizes[step], len(repr(state)) + len(repr(vars(auditor))))
        calls[step] += counter.calls
    early, late = slice(10, 40), slice(STEPS - 40, STEPS - 10)
    # Only numbers get longer, by a few digits.
    assert max(sizes[late]) <= 1.1 * max(sizes[early])
    assert sum(calls[late]) <= 1.1 * sum(calls[early])


@pytest.mark.parametrize(
    "reward", [{"lanes": 0}, {"lanes": 2, "seconds": 0.1}], ids=["generators score", "lanes score"]
)
def test_the_auditor_forgets_old_evaluations_and_hedged_slices(reward: dict[str, Any]) -> None:
    evaluation = {"every": 1, "chunks": 4, "chunk": 0.2, "score": 0.1}
    state = long_run(STEPS, "none", evaluation=evaluation, reward=reward)
    state = replace(state, terms=replace(state.terms, hedge_after=1.05, slice_failures_per_group=100))
    cluster, auditor = NoisyCluster(state, seed=1), Auditor(state)
    sizes, hedges = [0] * STEPS, 0

    while not state.finished:
        step, event = min(state.committed, STEPS - 1), cluster.next_event()
        state, actions = decide(state, event)
        auditor.observe(event, actions, state)
        for action in actions:
            cluster.submit(action)
        hedges += sum(isinstance(action, Generate) and action.hedges != NO_JOB for action in actions)
        sizes[step] = max(sizes[step], len(repr(vars(auditor))))
    assert hedges > STEPS / 4
    assert max(sizes[STEPS - 40 : STEPS - 10]) <= 1.2 * max(sizes[30:60])


@pytest.mark.parametrize("help_rule", ["none", "auto"])
def test_a_long_run_starts_as_cheaply_as_a_short_one(help_rule: str) -> None:
    states = [long_run(steps, help_rule) for steps in (10, 10, 100_000)]
    assert len(repr(states[2])) <= len(repr(states[1])) + 10
    counters = [CallCounter() for _ in states]
    for state, counter in zip(states, counters, strict=True):
        cluster = VirtualCluster(state)
        while state.committed < 3:
            state, actions = counter.decided(state, cluster.next_event())
            for action in actions:
                cluster.submit(action)
    assert counters[1].calls == counters[2].calls  # the first run also fills caches
