"""The makespan of a SPEC, from the scheduler's own forecast, without ids, leases and traces.

Fast enough to compare thousands of SPECs. A property test compares it with `simulate`.
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

SEARCH_BUDGET = 5_000


def predict_makespan(spec: Spec, search_budget: int = SEARCH_BUDGET) -> float:
    """The makespan in seconds; with `slice: auto`, that of the best slice size."""
    if spec.slice == "auto":
        return predict_makespan(with_best_slice(spec, search_budget), search_budget)
    start = initial_scheduler_state(spec, search_budget)
    forecast = forecast_from_state(start, at_ns=0)
    forecast.start_generators()
    if spec.policy.colocated:
        return _colocated_ns(forecast, start) / NS_PER_SECOND
    if start.terms.help in ("none", "greedy"):
        play(forecast, spec.steps, (), GREEDY if start.terms.help == "greedy" else WAIT_ALWAYS)
    else:
        _play_with_help(forecast, start.terms)
    return forecast.now / NS_PER_SECOND


def with_best_slice(spec: Spec, search_budget: int = SEARCH_BUDGET) -> Spec:
    """The SPEC with the slice size of the least makespan, the largest of equally good ones."""
    candidates = [spec.with_changes(slice=size) for size in reversed(spec.unit_sizes())]
    return min(candidates, key=lambda candidate: predict_makespan(candidate, search_budget))


def _play_with_help(forecast: Forecast, terms: Terms) -> None:
    """Decides about help at every bubble in which a slice may start, as the scheduler does."""
    plan: BubblePlan | None = None
    while forecast.committed < terms.steps:
        if forecast.run_to_decision():
            continue
        rounds = 0
        if forecast.can_start_round(current_step_only=False):
            plan = intend(terms, forecast.committed, forecast.now, plan, lambda: forecast)
            rounds = plan.bubbles[0].rounds if plan.bubbles else 0
            plan = replace(plan, bubbles=plan.bubbles[1:])
        if rounds:
            help_rounds(forecast, rounds, current_step_only=False, stop_when_ready=False)
        else:
            forecast.wait()


def _colocated_ns(forecast: Forecast, start: SchedulerState) -> int:
    """Every step is the same: generate and score all samples, switch roles, train, commit, switch back."""
    forecast.wait()
    terms, costs = start.terms, start.costs
    step_ns = forecast.now + terms.prompts * costs.train_ns(terms.samples_per_prompt) + costs.commit_ns
    # The run ends with its last commit, without a switch back to generating.
    return terms.steps * (step_ns + costs.switch_out_ns) + (terms.steps - 1) * costs.switch_in_ns
