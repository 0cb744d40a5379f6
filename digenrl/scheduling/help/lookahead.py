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
from digenrl.scheduling.help.futures import Moment, follow
from digenrl.scheduling.help.help_rules import RULES, WAIT_ALWAYS, Plan, SimpleHelpRule
from digenrl.scheduling.help.search import search_help
from digenrl.scheduling.state import PlannedBubble

NO_PLAN: Plan = ()
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
    last_node, start = bubble.counter.nodes + budget, Moment(bubble)
    until, best = _wait_always(start, budget)
    for candidate in _candidates(start, until, budget, known, best):
        if candidate.end_ns < best.end_ns:
            best = candidate
        # A plan that never ends is not accepted even without budget: perhaps only the trainer can generate.
        if bubble.counter.nodes > last_node and best.end_ns < NEVER:
            break
    return best.plan


def _wait_always(start: Moment, budget: int) -> tuple[int, _Candidate]:
    """Waits at every bubble. The cost of simulating the first step determines how far the budget reaches."""
    bubble = start.forecast
    before = bubble.counter.nodes
    bubble.count_fork()
    plan, commit = follow(start, bubble.committed + 1, (), WAIT_ALWAYS)
    affordable = budget // (FUTURES_WANTED * (bubble.counter.nodes - before))
    until = min(bubble.constants.steps, bubble.committed + max(1, min(HORIZON_STEPS, affordable)))
    rest, end = follow(commit, until, (), WAIT_ALWAYS)
    return until, _Candidate(end.forecast.now, plan + rest, WAIT_ALWAYS)


def _candidates(start: Moment, until: int, budget: int, known: Plan, waited: _Candidate) -> Iterator[_Candidate]:
    """Candidates, the most promising first, since the budget may end at any of them."""
    bubble = start.forecast
    if known:
        yield _simulated(start, until, known, WAIT_ALWAYS)
    by_rule = [waited]
    for rule in RULES:
        if rule is not WAIT_ALWAYS:
            by_rule.append(_simulated(start, until, (), rule))
            yield by_rule[-1]
    by_rule.sort(key=lambda candidate: candidate.end_ns)
    good_rules = [candidate.rule for candidate in by_rule[:2]]
    if bubble.current_step_unstarted():
        this_step = search_help(bubble, budget // 2, start=start).bubbles
        for rule in good_rules:
            yield _simulated(start, until, this_step, rule)
        yield _search_every_step(start, until, this_step, budget // 4)
    for rounds in range(ROUNDS_TRIED + 1):
        for rule in good_rules:
            yield _simulated(start, until, (PlannedBubble(bubble.now, rounds),), rule)


def _simulated(start: Moment, until: int, planned: Plan, rule: SimpleHelpRule) -> _Candidate:
    start.forecast.count_fork()
    plan, end = follow(start, until, planned, rule)
    return _Candidate(end.forecast.now, plan, rule)


def _search_every_step(start: Moment, until: int, this_step: Plan, budget: int) -> _Candidate:
    """Searches at the first bubble of every step up to the horizon. This step's search is done already."""
    committed = start.forecast.committed
    start.forecast.count_fork()
    plan, moment = follow(start, committed + 1, this_step, WAIT_ALWAYS)
    budget_of_a_step = budget // (until - committed)
    while moment.forecast.committed < until and moment.forecast.now < NEVER:
        future, step_plan = moment.forecast.copy(), NO_PLAN
        can_help = not future.run_to_decision() and future.current_step_unstarted() > 0
        moment = Moment(future)
        if can_help:
            step_plan = search_help(future, budget_of_a_step, start=moment).bubbles
        more, moment = follow(moment, min(until, future.committed + 1), step_plan, WAIT_ALWAYS)
        plan += more
    return _Candidate(moment.forecast.now, plan, WAIT_ALWAYS)
