"""`help: auto` with stale samples: simulates several steps ahead, because the next commit is not all that matters.

When generators may run ahead of the trainer, help for the next step brings a later commit forward and never this
one, so a search that considers this commit alone waits too often. `look_ahead` simulates whole futures up to a
horizon: simple rules, a search at every step, a search for this step alone, and every number of rounds at this
bubble. The best becomes the plan. While the run goes as predicted, a new plan replaces it only if it is predicted
to end earlier. So, by prediction, looking ahead is no worse than anything it tries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from digenrl.scheduling.help.forecast import Forecast
from digenrl.scheduling.help.forecast_constants import NEVER
from digenrl.scheduling.help.help_rules import RULES, WAIT_ALWAYS, Plan, SimpleHelpRule, simulate_help
from digenrl.scheduling.help.search import search_help
from digenrl.scheduling.state import PlannedBubble

HORIZON_STEPS = 6
ROUNDS_TRIED = 6
FUTURES_WANTED = 10  # futures that should fit into the budget; if they are expensive, the horizon is shortened


@dataclass(frozen=True, slots=True)
class _Candidate:
    end_ns: int
    plan: Plan
    rule: SimpleHelpRule


def look_ahead(bubble: Forecast, budget: int, known: Plan = ()) -> Plan:
    """The best plan from this bubble to the horizon. `known` is the rest of an earlier plan."""
    last_node = bubble.counter.nodes + budget
    until, best = _wait_always(bubble, budget)
    for candidate in _candidates(bubble, until, budget, known, best):
        if candidate.end_ns < best.end_ns:
            best = candidate
        # A plan that never ends is not accepted even without budget: perhaps only the trainer can generate.
        if bubble.counter.nodes > last_node and best.end_ns < NEVER:
            break
    return best.plan


def _wait_always(bubble: Forecast, budget: int) -> tuple[int, _Candidate]:
    """Waits at every bubble. The cost of simulating the first step determines how far the budget reaches."""
    before, future = bubble.counter.nodes, bubble.fork()
    plan = simulate_help(future, bubble.committed + 1, (), WAIT_ALWAYS)
    affordable = budget // (FUTURES_WANTED * (bubble.counter.nodes - before))
    until = min(bubble.constants.steps, bubble.committed + max(1, min(HORIZON_STEPS, affordable)))
    plan += simulate_help(future, until, (), WAIT_ALWAYS)
    return until, _Candidate(future.now, plan, WAIT_ALWAYS)


def _candidates(
    bubble: Forecast, until: int, budget: int, known: Plan, waited: _Candidate
) -> Iterator[_Candidate]:
    """Candidates, the most promising first, since the budget may end at any of them."""
    if known:
        yield _simulated(bubble, until, known, WAIT_ALWAYS)
    by_rule = [waited]
    for rule in RULES:
        if rule is not WAIT_ALWAYS:
            by_rule.append(_simulated(bubble, until, (), rule))
            yield by_rule[-1]
    by_rule.sort(key=lambda candidate: candidate.end_ns)
    good_rules = [candidate.rule for candidate in by_rule[:2]]
    if bubble.current_step_unstarted():
        this_step = search_help(bubble, budget // 2).bubbles
        for rule in good_rules:
            yield _simulated(bubble, until, this_step, rule)
        yield _search_every_step(bubble, until, this_step, budget // 4)
    for rounds in range(ROUNDS_TRIED + 1):
        for rule in good_rules:
            yield _simulated(bubble, until, (PlannedBubble(bubble.now, rounds),), rule)


def _simulated(bubble: Forecast, until: int, planned: Plan, rule: SimpleHelpRule) -> _Candidate:
    future = bubble.fork()
    plan = simulate_help(future, until, planned, rule)
    return _Candidate(future.now, plan, rule)


def _search_every_step(bubble: Forecast, until: int, this_step: Plan, budget: int) -> _Candidate:
    """Searches at the first bubble of every step up to the horizon. This step's search is done already."""
    future = bubble.fork()
    plan = [*simulate_help(future, bubble.committed + 1, this_step, WAIT_ALWAYS)]
    budget_of_a_step = budget // (until - bubble.committed)
    while future.committed < until and future.now < NEVER:
        step_plan: Plan = ()
        if not future.run_to_decision() and future.current_step_unstarted():
            step_plan = search_help(future, budget_of_a_step).bubbles
        plan += simulate_help(future, min(until, future.committed + 1), step_plan, WAIT_ALWAYS)
    return _Candidate(future.now, tuple(plan), WAIT_ALWAYS)
