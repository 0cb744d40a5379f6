"""What a SPEC with `assist: both` runs: its lanes share work by a rule, or it runs a simpler schedule.

`greedy` takes any available work, generating first. `search` takes the best rule that the search finds. `auto`
also compares it with colocated cards, with no help at all, and with a trainer that helps alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from digenrl.config.spec import Spec
from digenrl.scheduling import SchedulerState, SharedWorkRule
from digenrl.simulation.shared_work import (
    MOST_AT_ONCE,
    best_rules,
    best_stale_work,
    commit_ends_ns,
    compared_steps,
    greedy_rule,
    makespan_ns,
)
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.units import NS_PER_SECOND

PredictMakespan = Callable[[Spec], tuple[Spec, float]]  # of a SPEC without `both`, with its best slice size


@dataclass(frozen=True, slots=True)
class ChosenSchedule:
    """How a SPEC is run: with lanes that share work by a rule, or as another SPEC without one."""

    spec: Spec
    rule: SharedWorkRule | None
    makespan: float  # seconds

    def initial_state(self, search_budget: int) -> SchedulerState:
        if self.rule is None:
            return initial_scheduler_state(self.spec, search_budget)
        return initial_shared_state(self.spec, self.rule)


def initial_shared_state(spec: Spec, rule: SharedWorkRule) -> SchedulerState:
    """The start of a run whose lanes share work by a rule.

    With `slice: auto` a slice is one sample, and the rule says how many a lane takes at once.
    """
    fixed = spec.with_changes(slice=1) if spec.slice == "auto" else spec
    return initial_scheduler_state(fixed, search_budget=0, shared_work=rule)


def choose_schedule(spec: Spec, predict: PredictMakespan) -> ChosenSchedule:
    """The schedule for a SPEC whose lanes do both, by its help rule."""
    expected_ns = cache(partial(_expected_ns, spec))
    if spec.policy.help == "greedy":
        return _shared_schedule(spec, min((greedy_rule(size) for size in _sizes(spec)), key=expected_ns))
    # The best rules by their forecasts, compared on the scheduler itself.
    rules = best_rules(lambda rule: initial_shared_state(spec, rule), max(_sizes(spec)))
    terms = initial_shared_state(spec, rules[0]).terms
    best = _shared_schedule(spec, best_stale_work(rules, terms, expected_ns))
    if spec.policy.help == "search":
        return best
    for simpler in (
        spec.with_rules(assist="trainer", help="auto"),
        spec.with_rules(assist="none", help="none"),
        spec.with_rules(colocated=True),
    ):
        resolved, makespan = predict(simpler)
        if makespan <= best.makespan:
            best = ChosenSchedule(resolved, None, makespan)
    return best


def _shared_schedule(spec: Spec, rule: SharedWorkRule) -> ChosenSchedule:
    return ChosenSchedule(spec, rule, makespan_ns(initial_shared_state(spec, rule)) / NS_PER_SECOND)


def _expected_ns(spec: Spec, rule: SharedWorkRule) -> int:
    """The makespan. That of a long run is extrapolated from the mean time of a few steps."""
    steps = compared_steps(initial_shared_state(spec, rule).terms)
    ends_ns = commit_ends_ns(initial_shared_state(spec.with_changes(steps=steps), rule))
    if spec.steps == steps:
        return ends_ns[-1]
    return ends_ns[-1] + (spec.steps - steps) * (ends_ns[-2] - ends_ns[0]) // (steps - 2)


def _sizes(spec: Spec) -> range:
    """How many slices a lane may take at once: one if the SPEC says how large a slice is."""
    return range(1, min(MOST_AT_ONCE, spec.samples_per_prompt) + 1) if spec.slice == "auto" else range(1, 2)
