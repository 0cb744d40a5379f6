"""The product's own help policy: looks several steps ahead, because under stale starts the next commit is not all.

When generators may run ahead of the trainer, help for the next step brings a later commit forward and never this
one, so a search that looks at this commit alone waits too often. Looking ahead plays whole futures: simple rules,
the search repeated at every step, the search for this step alone, and every number of rounds at this bubble; each
to the end of the horizon. The best one is kept as the plan. As long as reality follows it, a new plan replaces it
only if it is predicted to end earlier; so, by prediction, looking ahead loses to none of what it tries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from digenrl.scheduling.help.forecast import Forecast
from digenrl.scheduling.help.forecast_facts import NEVER
from digenrl.scheduling.help.help_rules import RULES, WAIT_ALWAYS, HelpRule, play
from digenrl.scheduling.help.search import search_help
from digenrl.scheduling.state import PlannedBubble

HORIZON_STEPS = 6
ROUNDS_TRIED = 6
PLAYS = 10  # futures that should fit into the budget; where they are dear, the horizon comes nearer

Plan = tuple[PlannedBubble, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    end_ns: int
    plan: Plan
    rule: HelpRule


def look_ahead(bubble: Forecast, budget: int, known: Plan = ()) -> Plan:
    """The best plan from this bubble to the end of the horizon; `known` is an earlier plan from here on."""
    last_node = bubble.meter.nodes + budget
    until, best = _waited(bubble, budget)
    for candidate in _candidates(bubble, until, budget, known, best):
        if candidate.end_ns < best.end_ns:
            best = candidate
        # Not even an empty budget excuses a plan without an end: the trainer may be all that is left to generate.
        if bubble.meter.nodes > last_node and best.end_ns < NEVER:
            break
    return best.plan


def _waited(bubble: Forecast, budget: int) -> tuple[int, _Candidate]:
    """Waiting at every bubble; what playing its first step costs says how far ahead it is affordable to look."""
    before, future = bubble.meter.nodes, bubble.fork()
    plan = play(future, bubble.committed + 1, (), WAIT_ALWAYS)
    affordable = budget // (PLAYS * (bubble.meter.nodes - before))
    until = min(bubble.facts.steps, bubble.committed + max(1, min(HORIZON_STEPS, affordable)))
    plan += play(future, until, (), WAIT_ALWAYS)
    return until, _Candidate(future.now, plan, WAIT_ALWAYS)


def _candidates(
    bubble: Forecast, until: int, budget: int, known: Plan, waited: _Candidate
) -> Iterator[_Candidate]:
    """What is tried, the most promising first: the budget may end the trying anywhere."""
    if known:
        yield _played(bubble, until, known, WAIT_ALWAYS)
    by_rule = [waited]
    for rule in RULES:
        if rule is not WAIT_ALWAYS:
            by_rule.append(_played(bubble, until, (), rule))
            yield by_rule[-1]
    by_rule.sort(key=lambda candidate: candidate.end_ns)
    good_rules = [candidate.rule for candidate in by_rule[:2]]
    if bubble.current_step_unstarted():
        this_step = search_help(bubble, budget // 2).bubbles
        for rule in good_rules:
            yield _played(bubble, until, this_step, rule)
        yield _searched_every_step(bubble, until, this_step, budget // 4)
    for rounds in range(ROUNDS_TRIED + 1):
        for rule in good_rules:
            yield _played(bubble, until, (PlannedBubble(bubble.now, rounds),), rule)


def _played(bubble: Forecast, until: int, planned: Plan, rule: HelpRule) -> _Candidate:
    future = bubble.fork()
    plan = play(future, until, planned, rule)
    return _Candidate(future.now, plan, rule)


def _searched_every_step(bubble: Forecast, until: int, this_step: Plan, budget: int) -> _Candidate:
    """The search as a policy of its own, played to the horizon; this step's search is done already."""
    future = bubble.fork()
    plan = [*play(future, bubble.committed + 1, this_step, WAIT_ALWAYS)]
    budget_of_a_step = budget // (until - bubble.committed)
    while future.committed < until and future.now < NEVER:
        step_plan: Plan = ()
        if not future.run_to_decision() and future.current_step_unstarted():
            step_plan = search_help(future, budget_of_a_step).bubbles
        plan += play(future, min(until, future.committed + 1), step_plan, WAIT_ALWAYS)
    return _Candidate(future.now, tuple(plan), WAIT_ALWAYS)
