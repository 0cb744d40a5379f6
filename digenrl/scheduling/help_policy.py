"""TAG: whether the trainer helps at a bubble, and for how long, under each help policy."""

from __future__ import annotations

from digenrl.scheduling.forecast import forecast_from
from digenrl.scheduling.search import search_help
from digenrl.scheduling.state import UNLIMITED, BubblePlan, HelpPlan, SchedulerState

Choice = tuple[HelpPlan | None, BubblePlan | None]  # None: wait


def choose_help(state: SchedulerState, at_ns: int) -> Choice:
    """The decision of this bubble, and what is intended for the following ones."""
    return _POLICIES[state.terms.help](state, at_ns)


def _greedy(state: SchedulerState, at_ns: int) -> Choice:
    """Help as long as nothing is ready and a slice may start."""
    return HelpPlan(UNLIMITED, stop_when_ready=True, current_step_only=False), None


def _search(state: SchedulerState, at_ns: int) -> Choice:
    """The round counts with the earliest predicted commit of this step."""
    intended = state.bubble_plan
    known = intended.bubbles if intended is not None and intended.step == state.committed else ()
    if not (intended and intended.exact and known and known[0].opens_ns == at_ns):
        found = search_help(forecast_from(state, at_ns), state.terms.search_nodes, known)
        intended = BubblePlan(state.committed, found.bubbles, found.exact)
        known = found.bubbles
    rounds = known[0].rounds if known else 0
    plan = HelpPlan(rounds, stop_when_ready=False, current_step_only=True) if rounds else None
    return plan, BubblePlan(state.committed, known[1:], intended.exact)


_POLICIES = {"greedy": _greedy, "search": _search}
