"""How long a SPEC takes, and nothing else: the scheduler's own forecast, without its ids, leases and traces.

For planners that compare thousands of SPECs. A property test holds it against `simulate`.
"""

from __future__ import annotations

from digenrl.config.spec import Spec
from digenrl.scheduling.forecast import Forecast
from digenrl.scheduling.lookahead import look_ahead
from digenrl.scheduling.outlook import forecast_from
from digenrl.scheduling.playbook import GREEDY, WAIT_ALWAYS, play
from digenrl.scheduling.search import search_help
from digenrl.scheduling.state import PlannedBubble
from digenrl.simulation.durations import NS_PER_SECOND, opening_state
from digenrl.simulation.simulator import simulate

QUICK_SEARCH_BUDGET = 5_000

Plan = tuple[PlannedBubble, ...]


def quick_makespan(spec: Spec, search_budget: int = QUICK_SEARCH_BUDGET) -> float:
    """The makespan in seconds; with `slice: auto` that of the best slice size."""
    if spec.slice == "auto":
        sizes = spec.slice_sizes()
        return min(quick_makespan(spec.with_changes(slice=size), search_budget) for size in sizes)
    if spec.policy.colocated:
        return simulate(spec, search_budget).answer.makespan
    opening = opening_state(spec, search_budget)
    future = forecast_from(opening, at_ns=0)
    future.start_generators()
    plan: Plan = ()
    while future.committed < spec.steps:
        plan = _play_one_step(future, opening.terms.help, plan, search_budget)
    return future.now / NS_PER_SECOND


def _play_one_step(future: Forecast, policy: str, known: Plan, search_budget: int) -> Plan:
    """Plays until the next commit; returns what is intended beyond it."""
    until = future.committed + 1
    rule = GREEDY if policy == "greedy" else WAIT_ALWAYS
    plan: Plan = ()
    if policy in ("search", "auto") and _reach_first_choice(future):
        ahead = tuple(bubble for bubble in known if bubble.opens_ns >= future.now)
        ahead = ahead if ahead and ahead[0].opens_ns == future.now else ()
        if policy == "auto" and future.facts.budget:
            plan = look_ahead(future, search_budget, ahead)
        elif future.current_step_unstarted():
            plan = search_help(future, search_budget).bubbles
    if future.committed < until:
        play(future, until, plan, rule)
    return plan


def _reach_first_choice(future: Forecast) -> bool:
    """Plays on to the first bubble of the step at which the trainer could help; False if there is none."""
    step = future.committed
    while not future.run_to_decision():
        if future.can_start_round(current_step_only=False):
            return True
        future.wait()
    assert future.committed == step + 1
    return False
