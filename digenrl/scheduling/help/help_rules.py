"""Plays help in a forecast: so many rounds, or by a rule, up to a commit that lies ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from digenrl.scheduling.help.forecast import Forecast
from digenrl.scheduling.state import UNLIMITED, PlannedBubble


@dataclass(frozen=True, slots=True)
class HelpRule:
    """A simple way to help at every bubble; after each round the trainer returns if something is ready."""

    name: str
    most_rounds: int
    current_step_only: bool = False
    only_if_in_time: bool = False  # help only if generators alone would not be through before the helpers are


WAIT_ALWAYS = HelpRule("wait", 0)
GREEDY = HelpRule("greedy", UNLIMITED)
RULES = (
    WAIT_ALWAYS,
    GREEDY,
    HelpRule("one round", 1),
    HelpRule("greedy, this step", UNLIMITED, current_step_only=True),
    HelpRule("one round, this step", 1, current_step_only=True),
    HelpRule("greedy, in time", UNLIMITED, only_if_in_time=True),
    HelpRule("greedy, this step, in time", UNLIMITED, current_step_only=True, only_if_in_time=True),
    HelpRule("one round, in time", 1, only_if_in_time=True),
)
# What counts when only the current step does; waiting comes first, so that nothing is worse than that.
STEP_RULES = tuple(rule for rule in RULES if rule.current_step_only or rule is WAIT_ALWAYS)


def help_rounds(future: Forecast, rounds: int, current_step_only: bool, stop_when_ready: bool) -> int:
    """Switches in, plays up to `rounds` rounds, switches out; returns how many rounds there were."""
    future.switch_in()
    played = 0
    while played < rounds and future.can_start_round(current_step_only):
        if played and stop_when_ready and future.ready:
            break
        future.round()
        played += 1
    future.switch_out()
    return played


def play(
    future: Forecast, until_step: int, planned: Sequence[PlannedBubble], rule: HelpRule
) -> tuple[PlannedBubble, ...]:
    """Plays on until `until_step` steps are committed: first by plan, then by rule.

    Returns the bubbles met at which a slice could start, with what was done there. A future without end rests at
    NEVER.
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
        opens_ns, intended = future.now, next(plan, None)
        rounds = _follow(future, intended) if intended is not None else _apply(future, rule)
        met.append(PlannedBubble(opens_ns, rounds))
        if not rounds and not future.wait():
            break
    return tuple(met)


def _follow(future: Forecast, intended: PlannedBubble) -> int:
    if not intended.rounds:
        return 0
    return help_rounds(future, intended.rounds, current_step_only=False, stop_when_ready=False)


def _apply(future: Forecast, rule: HelpRule) -> int:
    if not rule.most_rounds or not future.can_start_round(rule.current_step_only):
        return 0
    if rule.only_if_in_time and _generators_are_quicker(future):
        return 0
    return help_rounds(future, rule.most_rounds, rule.current_step_only, stop_when_ready=True)


def _generators_are_quicker(future: Forecast) -> bool:
    """Whether the generators alone finish what is left of this step before one round of help would end."""
    facts, unstarted = future.facts, future.current_step_unstarted()
    round_ends_ns = future.now + facts.switch_in_ns + facts.helper_ns
    if not unstarted:
        return False
    made = sum(
        lanes * offer.slices_at_once * max(0, (round_ends_ns - free_ns - 1) // offer.slice_ns)
        for offer, free_ns, lanes in future.generator_takes()
    )
    return unstarted <= made
