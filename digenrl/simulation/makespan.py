"""The makespan of a SPEC, from the scheduler's own forecast, without jobs, results and traces.

Fast enough to compare thousands of SPECs. A property test compares it with `simulate`. SPECs with evaluations or
checkpoints run on the scheduler itself.
"""

from __future__ import annotations

from digenrl.config.spec import Spec
from digenrl.scheduling.help.choose_help import next_rounds, plan_help
from digenrl.scheduling.help.forecast import Forecast
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.scheduling.help.help_rules import GREEDY, WAIT_ALWAYS, simulate_help, simulate_rounds
from digenrl.scheduling.state import BubblePlan, HelpPlan, SchedulerState
from digenrl.scheduling.terms import Terms
from digenrl.simulation.both_directions import ChosenSchedule, choose_schedule
from digenrl.simulation.shared_work import makespan_ns
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.units import NS_PER_SECOND

SEARCH_BUDGET = 5_000


def predict_makespan(spec: Spec, search_budget: int = SEARCH_BUDGET) -> float:
    """The makespan in seconds; with `slice: auto`, that of the best slice size."""
    if spec.shares_work:
        return schedule_if_lanes_do_both(spec, search_budget).makespan
    if spec.slice == "auto":
        return predict_makespan(with_best_slice(spec, search_budget), search_budget)
    start = initial_scheduler_state(spec, search_budget)
    if spec.evaluation is not None or spec.checkpoint is not None:
        return makespan_ns(start) / NS_PER_SECOND
    forecast = forecast_from_state(start, at_ns=0)
    forecast.start_generators()
    if spec.policy.colocated:
        return _colocated_ns(forecast, start) / NS_PER_SECOND
    if start.terms.help in ("none", "greedy"):
        simulate_help(forecast, spec.steps, (), GREEDY if start.terms.help == "greedy" else WAIT_ALWAYS)
    else:
        _simulate_planned_help(forecast, start.terms)
    return forecast.now / NS_PER_SECOND


def with_best_slice(spec: Spec, search_budget: int = SEARCH_BUDGET) -> Spec:
    """The SPEC with the slice size of the least makespan, the largest of equally good ones.

    Lanes that do both take pieces of any size: their SPEC keeps `auto`.
    """
    if spec.shares_work:
        return spec
    candidates = [spec.with_changes(slice=size) for size in reversed(spec.unit_sizes())]
    return min(candidates, key=lambda candidate: _exact_makespan(candidate, search_budget))


def _exact_makespan(spec: Spec, search_budget: int) -> float:
    """The makespan in seconds; that of the scheduler itself where the forecast is an estimate."""
    start = initial_scheduler_state(spec, search_budget)
    split_batches = start.terms.score_unit < min(start.terms.score_batch, start.terms.slice_size)
    if split_batches or any(lane.slices_at_once > 1 for lane in start.lanes):
        return makespan_ns(start) / NS_PER_SECOND
    return predict_makespan(spec, search_budget)


def schedule_if_lanes_do_both(spec: Spec, search_budget: int = SEARCH_BUDGET) -> ChosenSchedule:
    """The schedule of a SPEC with `assist: both`, which may be a simpler one."""

    def predict(simpler: Spec) -> tuple[Spec, float]:
        fixed = with_best_slice(simpler, search_budget) if simpler.slice == "auto" else simpler
        return fixed, _exact_makespan(fixed, search_budget)

    return choose_schedule(spec, predict)


def _simulate_planned_help(forecast: Forecast, terms: Terms) -> None:
    """Decides about help at every bubble in which a slice may start, as the scheduler does."""
    plan: BubblePlan | None = None
    while forecast.committed < terms.steps:
        if forecast.run_to_decision():
            continue
        rounds = 0
        if forecast.can_start_round(current_step_only=False):
            rounds, plan = next_rounds(plan_help(terms, forecast.committed, forecast.now, plan, lambda: forecast))
        if rounds:
            simulate_rounds(forecast, HelpPlan(rounds, stop_when_ready=False, current_step_only=False))
        else:
            forecast.wait()


def _colocated_ns(forecast: Forecast, start: SchedulerState) -> int:
    """Every step is the same: generate and score all samples, switch roles, train, commit, switch back."""
    forecast.wait()
    terms, costs = start.terms, start.costs
    step_ns = forecast.now + terms.prompts * costs.train_ns(terms.samples_per_prompt) + costs.commit_ns
    # The run ends with its last commit, without a switch back to generating.
    return terms.steps * (step_ns + costs.switch_out_ns) + (terms.steps - 1) * costs.switch_in_ns
