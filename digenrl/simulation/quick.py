"""How long a SPEC takes, and nothing else: the scheduler's own forecast, without its ids, leases and traces.

For planners that compare thousands of SPECs. A property test holds it against `simulate`.
"""

from __future__ import annotations

from dataclasses import replace

from digenrl.config.spec import Spec
from digenrl.scheduling.help.choose_help import intend
from digenrl.scheduling.help.forecast import Forecast
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.scheduling.help.help_rules import GREEDY, WAIT_ALWAYS, help_rounds, play
from digenrl.scheduling.state import BubblePlan, SchedulerState
from digenrl.scheduling.terms import Terms
from digenrl.simulation.spec_costs import NS_PER_SECOND, initial_scheduler_state

QUICK_SEARCH_BUDGET = 5_000


def quick_makespan(spec: Spec, search_budget: int = QUICK_SEARCH_BUDGET) -> float:
    """The makespan in seconds; with `slice: auto` that of the best slice size."""
    if spec.slice == "auto":
        return quick_makespan(with_best_slice(spec, search_budget), search_budget)
    opening = initial_scheduler_state(spec, search_budget)
    future = forecast_from_state(opening, at_ns=0)
    future.start_generators()
    if spec.policy.colocated:
        return _colocated_ns(future, opening) / NS_PER_SECOND
    if opening.terms.help in ("none", "greedy"):
        play(future, spec.steps, (), GREEDY if opening.terms.help == "greedy" else WAIT_ALWAYS)
    else:
        _play_by_policy(future, opening.terms)
    return future.now / NS_PER_SECOND


def with_best_slice(spec: Spec, search_budget: int = QUICK_SEARCH_BUDGET) -> Spec:
    """The SPEC with the slice of the least makespan, the largest among equals."""
    candidates = [spec.with_changes(slice=size) for size in reversed(spec.unit_sizes())]
    return min(candidates, key=lambda candidate: quick_makespan(candidate, search_budget))


def _play_by_policy(future: Forecast, terms: Terms) -> None:
    """Asks the policy at every bubble at which a slice may start, as the scheduler does."""
    plan: BubblePlan | None = None
    while future.committed < terms.steps:
        if future.run_to_decision():
            continue
        rounds = 0
        if future.can_start_round(current_step_only=False):
            plan = intend(terms, future.committed, future.now, plan, lambda: future)
            rounds = plan.bubbles[0].rounds if plan.bubbles else 0
            plan = replace(plan, bubbles=plan.bubbles[1:])
        if rounds:
            help_rounds(future, rounds, current_step_only=False, stop_when_ready=False)
        else:
            future.wait()


def _colocated_ns(future: Forecast, opening: SchedulerState) -> int:
    """Every step is the same: generate and score everything, change roles, train, commit, change back."""
    future.wait()
    terms, costs = opening.terms, opening.costs
    step_ns = future.now + terms.prompts * costs.train_ns(terms.samples_per_prompt) + costs.commit_ns
    # The run ends with its last commit: the change back to generating is not needed any more.
    return terms.steps * (step_ns + costs.switch_out_ns) + (terms.steps - 1) * costs.switch_in_ns
