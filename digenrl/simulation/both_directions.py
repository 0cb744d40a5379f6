"""What a SPEC with `assist: both` runs: its lanes share work by a rule, or it runs a simpler schedule.

`greedy` takes whatever there is, generating first. `search` takes the best rule that the search finds. `auto` also
compares it with colocated cards, with no help at all, and with a trainer that helps alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from digenrl.config.spec import Spec
from digenrl.scheduling import SchedulerState, SharedWorkRule
from digenrl.simulation.shared_work import (
    MOST_AT_ONCE,
    best_rules,
    commit_ends_ns,
    greedy_rule,
    makespan_ns,
    with_stale_limits,
)
from digenrl.simulation.spec_costs import NS_PER_SECOND, initial_scheduler_state

COMPARED_STEPS = 4  # rules are compared by a few steps: most of the others resemble the last but one

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
    if spec.policy.help == "greedy":
        return _best(spec, [greedy_rule(at_once) for at_once in _sizes(spec)])
    # The best rules by their forecasts, compared on the scheduler itself.
    rules = best_rules(lambda rule: initial_shared_state(spec, rule), max(_sizes(spec)))
    best = _best(spec, with_stale_limits(rules, initial_shared_state(spec, rules[0]).terms))
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


def _best(spec: Spec, rules: Iterable[SharedWorkRule]) -> ChosenSchedule:
    rules = list(rules)
    chosen = rules[0]
    if len(rules) > 1:
        chosen = min(rules, key=lambda rule: _expected_ns(spec, rule))
    return ChosenSchedule(spec, chosen, makespan_ns(initial_shared_state(spec, chosen)) / NS_PER_SECOND)


def _expected_ns(spec: Spec, rule: SharedWorkRule) -> int:
    """The makespan if all steps but the first ones and the last take as long as the last but one of a few."""
    steps = min(spec.steps, COMPARED_STEPS)
    ends_ns = commit_ends_ns(initial_shared_state(spec.with_changes(steps=steps), rule))
    if spec.steps == steps:
        return ends_ns[-1]
    return ends_ns[-1] + (spec.steps - steps) * (ends_ns[-2] - ends_ns[-3])


def _sizes(spec: Spec) -> range:
    """How many slices a lane may take at once: one if the SPEC says how large a slice is."""
    return range(1, min(MOST_AT_ONCE, spec.samples_per_prompt) + 1) if spec.slice == "auto" else range(1, 2)
