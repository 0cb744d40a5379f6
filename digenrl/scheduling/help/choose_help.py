"""TAG: whether the trainer helps at a bubble, and for how long, under each help policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from digenrl.scheduling.help.forecast import Forecast
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.scheduling.help.lookahead import look_ahead
from digenrl.scheduling.help.search import search_help
from digenrl.scheduling.state import UNLIMITED, BubblePlan, HelpPlan, PlannedBubble, SchedulerState
from digenrl.scheduling.terms import Terms

CLOSE_ENOUGH = 10  # measured times stray: a bubble is the one that was planned if it opens within 1/10 of a slice


def choose_help(state: SchedulerState, at_ns: int) -> tuple[HelpPlan | None, BubblePlan | None]:
    """The decision of this bubble (None: wait), and what is intended for the following ones."""
    if state.terms.help == "greedy":
        return HelpPlan(UNLIMITED, stop_when_ready=True, current_step_only=False), None
    plan = intend(
        state.terms, state.committed, at_ns, state.bubble_plan, lambda: forecast_from_state(state, at_ns)
    )
    rounds, rest = plan.bubbles[0].rounds if plan.bubbles else 0, replace(plan, bubbles=plan.bubbles[1:])
    if not rounds:
        return None, rest
    return HelpPlan(rounds, stop_when_ready=False, current_step_only=not looks_further(state.terms)), rest


def looks_further(terms: Terms) -> bool:
    """Whether more than the next commit counts. On-policy every step stands alone: the search is all there is."""
    return terms.help == "auto" and terms.stale_budget > 0


def intend(
    terms: Terms, step: int, at_ns: int, earlier: BubblePlan | None, look: Callable[[], Forecast]
) -> BubblePlan:
    """What `search` and `auto` intend from the bubble that opens now; its first entry is this bubble.

    `look` gives the forecast; it is asked for only where the earlier plan no longer serves.
    """
    if earlier is not None and _still_serves(earlier, step, at_ns):
        return earlier
    bubble = look()
    ahead = _bubbles_ahead(earlier, at_ns, bubble.shortest_slice_ns() // CLOSE_ENOUGH)
    if looks_further(terms):
        bubbles = look_ahead(bubble, terms.search_budget, ahead)
        return BubblePlan(step, bubbles, exact=True, length=len(bubbles))
    if not bubble.current_step_unstarted():
        return BubblePlan(step, (), exact=True, length=0)
    found = search_help(bubble, terms.search_budget, ahead)
    return BubblePlan(step, found.bubbles, found.exact, len(found.bubbles))


def _still_serves(plan: BubblePlan, step: int, at_ns: int) -> bool:
    """Whether a plan made earlier in this step is kept: all went as predicted, and a new search would hardly
    find better. One that ran out of budget is worth repeating once half of its bubbles have passed."""
    if plan.step != step or not plan.bubbles or plan.bubbles[0].opens_ns != at_ns:
        return False
    return plan.exact or 2 * len(plan.bubbles) > plan.length


def _bubbles_ahead(plan: BubblePlan | None, at_ns: int, tolerance_ns: int) -> tuple[PlannedBubble, ...]:
    """What was intended from about this moment on, to be tried again; nothing, if reality went another way."""
    if plan is None or not plan.bubbles or abs(plan.bubbles[0].opens_ns - at_ns) > tolerance_ns:
        return ()
    return plan.bubbles
