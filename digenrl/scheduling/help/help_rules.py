"""Simulates help in a forecast: by a plan or by a simple rule, up to a later commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from digenrl.scheduling.help.forecast import Forecast
from digenrl.scheduling.state import HelpPlan, PlannedBubble
from digenrl.units import UNLIMITED

Plan = tuple[PlannedBubble, ...]


@dataclass(frozen=True, slots=True)
class SimpleHelpRule:
    """A rule that helps at every bubble. After each round the trainer returns if something is ready to train."""

    name: str
    most_rounds: int
    current_step_only: bool = False
    only_if_in_time: bool = False  # help only if generators alone would not finish the step before a round ends


WAIT_ALWAYS = SimpleHelpRule("wait", 0)
GREEDY = SimpleHelpRule("greedy", UNLIMITED)
RULES = (
    WAIT_ALWAYS,
    GREEDY,
    SimpleHelpRule("one round", 1),
    SimpleHelpRule("greedy, this step", UNLIMITED, current_step_only=True),
    SimpleHelpRule("one round, this step", 1, current_step_only=True),
    SimpleHelpRule("greedy, in time", UNLIMITED, only_if_in_time=True),
    SimpleHelpRule("greedy, this step, in time", UNLIMITED, current_step_only=True, only_if_in_time=True),
    SimpleHelpRule("one round, in time", 1, only_if_in_time=True),
)
# Rules for the current step alone. Waiting comes first, so no result is worse than waiting.
STEP_RULES = tuple(rule for rule in RULES if rule.current_step_only or rule is WAIT_ALWAYS)


def simulate_rounds(future: Forecast, plan: HelpPlan) -> int:
    """Simulates the help of one bubble, with both role switches. Returns the number of rounds."""
    future.switch_in()
    rounds = 0
    while plan.wants_round(rounds, bool(future.ready)) and future.can_start_round(plan.current_step_only):
        future.round()
        rounds += 1
    future.switch_out()
    return rounds


def simulate_help(
    future: Forecast, until_step: int, planned: Sequence[PlannedBubble], rule: SimpleHelpRule
) -> Plan:
    """Simulates until `until_step` steps are committed: first by the plan, then by the rule.

    Returns the bubbles in which a slice could start, with the rounds of help in each. A future that never reaches
    the step ends at NEVER.
    """
    met: list[PlannedBubble] = []
    plan = iter(planned)
    while future.committed < until_step:
        if future.run_to_decision():
            continue
        if not future.can_start_round(current_step_only=False):
            if not future.wait():
                break
            continue
        opens_ns, bubble = future.now, next(plan, None)
        decided = help_by_rule(future, rule) if bubble is None else planned_help(bubble)
        rounds = simulate_rounds(future, decided) if decided is not None else 0
        met.append(PlannedBubble(opens_ns, rounds))
        if not rounds and not future.wait():
            break
    return tuple(met)


def planned_help(bubble: PlannedBubble) -> HelpPlan | None:
    """The help of a plan in its bubble; None: the trainer waits."""
    if not bubble.rounds:
        return None
    return HelpPlan(bubble.rounds, stop_when_ready=False, current_step_only=False)


def help_by_rule(future: Forecast, rule: SimpleHelpRule) -> HelpPlan | None:
    """The help of a rule in the bubble that opens now; None: the trainer waits."""
    if not rule.most_rounds or not future.can_start_round(rule.current_step_only):
        return None
    if rule.only_if_in_time and _generators_finish_first(future):
        return None
    return HelpPlan(rule.most_rounds, stop_when_ready=True, current_step_only=rule.current_step_only)


def _generators_finish_first(future: Forecast) -> bool:
    """Whether the generators alone finish what is left of this step before one round of help would end."""
    constants, unstarted = future.constants, future.current_step_unstarted()
    round_ends_ns = future.now + constants.switch_in_ns + constants.helper_ns
    if not unstarted:
        return False
    finished = sum(
        lanes * offer.slices_at_once * max(0, (round_ends_ns - free_ns - 1) // offer.slice_ns)
        for offer, free_ns, lanes in future.generators()
    )
    return unstarted <= finished
