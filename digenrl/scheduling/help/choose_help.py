"""TAG: whether the trainer helps at a bubble, and for how long, under each help rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from digenrl.scheduling.help.forecast import Forecast
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.scheduling.help.help_rules import Plan
from digenrl.scheduling.help.lookahead import look_ahead
from digenrl.scheduling.help.search import search_help
from digenrl.scheduling.state import BubblePlan, HelpPlan, SchedulerState
from digenrl.scheduling.terms import Terms
from digenrl.units import UNLIMITED

CLOSE_ENOUGH = 10  # measured times vary: a bubble is the planned one if it opens within 1/10 of a slice


def choose_help(state: SchedulerState, at_ns: int) -> tuple[HelpPlan | None, BubblePlan | None]:
    """The decision for this bubble (None: wait), and the plan for the following ones."""
    if state.terms.help == "greedy":
        return HelpPlan(UNLIMITED, stop_when_ready=True, current_step_only=False), None
    plan = plan_help(
        state.terms, state.committed, at_ns, state.bubble_plan, lambda: forecast_from_state(state, at_ns)
    )
    rounds, rest = next_rounds(plan)
    if not rounds:
        return None, rest
    return HelpPlan(rounds, stop_when_ready=False, current_step_only=not _looks_beyond_step(state.terms)), rest


def plan_help(
    terms: Terms, step: int, at_ns: int, earlier: BubblePlan | None, forecast: Callable[[], Forecast]
) -> BubblePlan:
    """The plan of `search` and `auto` from the bubble that opens now; its first entry is this bubble.

    `forecast` is called only if the earlier plan cannot be kept.
    """
    if earlier is not None and _can_be_kept(earlier, step, at_ns):
        return earlier
    bubble = forecast()
    known = _bubbles_ahead(earlier, at_ns, bubble.shortest_slice_ns() // CLOSE_ENOUGH)
    if _looks_beyond_step(terms):
        bubbles = look_ahead(bubble, terms.search_budget, known)
        return BubblePlan(step, bubbles, exact=True, length=len(bubbles))
    if not bubble.current_step_unstarted():
        return BubblePlan(step, (), exact=True, length=0)
    found = search_help(bubble, terms.search_budget, known)
    return BubblePlan(step, found.bubbles, found.exact, len(found.bubbles))


def next_rounds(plan: BubblePlan) -> tuple[int, BubblePlan]:
    """The rounds of help at the plan's first bubble, and the rest of the plan."""
    return plan.bubbles[0].rounds if plan.bubbles else 0, replace(plan, bubbles=plan.bubbles[1:])


def _looks_beyond_step(terms: Terms) -> bool:
    """Whether commits after the next one matter. On-policy they do not, so the search of a step is enough."""
    return terms.help == "auto" and terms.stale_budget > 0


def _can_be_kept(plan: BubblePlan, step: int, at_ns: int) -> bool:
    """Whether everything went as predicted and a new search is unlikely to find a better plan.

    A plan whose search ran out of budget is searched again once half of its bubbles have passed.
    """
    if plan.step != step or not plan.bubbles or plan.bubbles[0].opens_ns != at_ns:
        return False
    return plan.exact or 2 * len(plan.bubbles) > plan.length


def _bubbles_ahead(plan: BubblePlan | None, at_ns: int, tolerance_ns: int) -> Plan:
    """The rest of the earlier plan, as a candidate for the new one, unless its times were too wrong."""
    if plan is None or not plan.bubbles or abs(plan.bubbles[0].opens_ns - at_ns) > tolerance_ns:
        return ()
    return plan.bubbles
