"""TAG: whether the trainer helps at a bubble, and for how long, under each help policy."""

from __future__ import annotations

from dataclasses import replace

from digenrl.scheduling.lookahead import look_ahead
from digenrl.scheduling.outlook import forecast_from
from digenrl.scheduling.search import search_help
from digenrl.scheduling.state import UNLIMITED, BubblePlan, HelpPlan, PlannedBubble, SchedulerState

Choice = tuple[HelpPlan | None, BubblePlan | None]  # None: wait; and: nothing intended


def choose_help(state: SchedulerState, at_ns: int) -> Choice:
    """The decision of this bubble, and what is intended for the following ones."""
    return _POLICIES[state.terms.help](state, at_ns)


def _greedy(state: SchedulerState, at_ns: int) -> Choice:
    """Help as long as nothing is ready and a slice may start."""
    return HelpPlan(UNLIMITED, stop_when_ready=True, current_step_only=False), None


def _search(state: SchedulerState, at_ns: int) -> Choice:
    """The round counts with the earliest predicted commit of this step."""
    plan = _plan_that_holds(state, at_ns)
    if plan is None:
        future = forecast_from(state, at_ns)
        if not future.current_step_unstarted():
            return None, state.bubble_plan
        found = search_help(future, state.terms.search_budget, _bubbles_ahead(state, at_ns))
        plan = BubblePlan(state.committed, found.bubbles, found.exact, len(found.bubbles))
    return _carry_out(plan, current_step_only=True)


def _auto(state: SchedulerState, at_ns: int) -> Choice:
    """On-policy every step stands alone, and the search is all there is to it; else look further ahead."""
    if not state.terms.stale_budget:
        return _search(state, at_ns)
    plan = _plan_that_holds(state, at_ns)
    if plan is None:
        future = forecast_from(state, at_ns)
        bubbles = look_ahead(future, state.terms.search_budget, _bubbles_ahead(state, at_ns))
        plan = BubblePlan(state.committed, bubbles, exact=True, length=len(bubbles))
    return _carry_out(plan, current_step_only=False)


def _plan_that_holds(state: SchedulerState, at_ns: int) -> BubblePlan | None:
    """The plan made earlier in this step, if all went as predicted and a new search would hardly find better."""
    plan = state.bubble_plan
    if plan is None or plan.step != state.committed or not plan.bubbles or plan.bubbles[0].opens_ns != at_ns:
        return None
    # A search that ran out of budget is worth repeating once half of its bubbles have passed.
    if not plan.exact and 2 * len(plan.bubbles) <= plan.length:
        return None
    return plan


def _bubbles_ahead(state: SchedulerState, at_ns: int) -> tuple[PlannedBubble, ...]:
    """What was intended from this very moment on."""
    plan = state.bubble_plan
    if plan is None or not plan.bubbles or plan.bubbles[0].opens_ns != at_ns:
        return ()
    return plan.bubbles


def _carry_out(plan: BubblePlan, current_step_only: bool) -> Choice:
    rounds = plan.bubbles[0].rounds if plan.bubbles else 0
    rest = replace(plan, bubbles=plan.bubbles[1:])
    if not rounds:
        return None, rest
    return HelpPlan(rounds, stop_when_ready=False, current_step_only=current_step_only), rest


_POLICIES = {"greedy": _greedy, "search": _search, "auto": _auto}
