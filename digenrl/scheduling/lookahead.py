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

from digenrl.scheduling.forecast import NEVER, Forecast
from digenrl.scheduling.playbook import RULES, WAIT_ALWAYS, HelpRule, play
from digenrl.scheduling.search import search_help
from digenrl.scheduling.state import PlannedBubble

HORIZON_STEPS = 6
ROUNDS_TRIED = 6
SEARCH_SHARE = 4  # a search inside a played future gets 1/4 of the budget, shared by the steps of the horizon

Plan = tuple[PlannedBubble, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    end_ns: int
    plan: Plan
    rule: HelpRule


def look_ahead(bubble: Forecast, budget: int, known: Plan = ()) -> Plan:
    """The best plan from this bubble to the end of the horizon; `known` is an earlier plan from here on."""
    until = min(bubble.facts.steps, bubble.committed + HORIZON_STEPS)
    last_instant = bubble.meter.instants + budget
    best: _Candidate | None = None
    for candidate in _candidates(bubble, until, budget, known):
        if best is None or candidate.end_ns < best.end_ns:
            best = candidate
        if bubble.meter.instants > last_instant:
            break
    assert best is not None, "waiting is always a candidate"
    return best.plan


def _candidates(bubble: Forecast, until: int, budget: int, known: Plan) -> Iterator[_Candidate]:
    """What is tried, the most promising first: the budget may end the trying anywhere."""
    if known:
        yield _played(bubble, until, known, WAIT_ALWAYS)
    by_rule = []
    for rule in RULES:
        by_rule.append(_played(bubble, until, (), rule))
        yield by_rule[-1]
    by_rule.sort(key=lambda candidate: candidate.end_ns)
    good_rules = [candidate.rule for candidate in by_rule[:2]]
    if bubble.current_step_unstarted():
        yield _searched_every_step(bubble, until, budget // SEARCH_SHARE)
        this_step = search_help(bubble, budget // SEARCH_SHARE).bubbles
        for rule in good_rules:
            yield _played(bubble, until, this_step, rule)
    for rounds in range(ROUNDS_TRIED + 1):
        for rule in good_rules:
            yield _played(bubble, until, (PlannedBubble(bubble.now, rounds),), rule)


def _played(bubble: Forecast, until: int, planned: Plan, rule: HelpRule) -> _Candidate:
    future = bubble.fork()
    plan = play(future, until, planned, rule)
    return _Candidate(future.now, plan, rule)


def _searched_every_step(bubble: Forecast, until: int, budget: int) -> _Candidate:
    """The search as a policy of its own, played to the horizon."""
    future = bubble.fork()
    plan: list[PlannedBubble] = []
    budget_of_a_step = budget // (until - bubble.committed)
    while future.committed < until and future.now < NEVER:
        step_plan: Plan = ()
        if not future.run_to_decision() and future.current_step_unstarted():
            step_plan = search_help(future, budget_of_a_step).bubbles
        plan += play(future, min(until, future.committed + 1), step_plan, WAIT_ALWAYS)
    return _Candidate(future.now, tuple(plan), WAIT_ALWAYS)
