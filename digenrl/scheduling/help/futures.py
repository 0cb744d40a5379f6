"""Futures from one bubble, of which each is simulated once: many plans and rules in a search decide alike.

A future is a chain of moments; what follows a decision is kept for the next plan that decides so. It counts as
many nodes every time, as if it was simulated again, so a search with a budget ends where it would without memory.
"""

from __future__ import annotations

from typing import Literal

from digenrl.scheduling.help.forecast import COPIES_PER_NODE, Forecast
from digenrl.scheduling.help.help_rules import Plan, SimpleHelpRule, help_by_rule, planned_help, simulate_help
from digenrl.scheduling.state import HelpPlan, PlannedBubble

Opens = Literal["bubble", "step", "nothing"]  # "nothing": nothing follows in this future

WAITED = -1


class Moment:
    """A bubble in which a slice could start, a commit, or any other start. Its forecast is not advanced."""

    __slots__ = ("_following", "_helping", "forecast", "opens")

    def __init__(self, forecast: Forecast, opens: Opens = "step") -> None:
        self.forecast, self.opens = forecast, opens
        # After the switch to helping and 0, 1, 2, ... rounds, with the nodes from here to there.
        self._helping: list[tuple[Forecast, int]] = []
        self._following: dict[int, tuple[Moment, int]] = {}  # by rounds of help or WAITED, with their nodes

    def after(self, plan: HelpPlan | None) -> tuple[int, Moment]:
        """The rounds that the trainer helps (None: it waits), and the next moment."""
        counter = self.forecast.counter
        rounds = WAITED if plan is None else self._rounds(plan)
        if rounds not in self._following:
            start, to_start = (self.forecast, 0) if plan is None else self._helping[rounds]
            before, future = counter.nodes, start.copy()
            opens = self._run_on(future, rounds)
            self._following[rounds] = Moment(future, opens), to_start + counter.nodes - before
            counter.nodes = before
        moment, nodes = self._following[rounds]
        counter.nodes += nodes
        return max(0, rounds), moment

    def _rounds(self, plan: HelpPlan) -> int:
        rounds = 0
        while True:
            future = self._after_rounds(rounds)
            wanted = plan.wants_round(rounds, bool(future.ready))
            if not wanted or not future.can_start_round(plan.current_step_only):
                return rounds
            rounds += 1

    def _after_rounds(self, rounds: int) -> Forecast:
        if rounds == len(self._helping):
            last, to_last = self._helping[-1] if rounds else (self.forecast, 0)
            counter, future = last.counter, last.copy()
            before = counter.nodes
            if rounds:
                future.round()
            else:
                future.switch_in()
            self._helping.append((future, to_last + counter.nodes - before))
            counter.nodes = before
        return self._helping[rounds][0]

    def _run_on(self, future: Forecast, rounds: int) -> Opens:
        """Runs to the next moment. A bubble in which no slice started passes before the trainer decides again."""
        if rounds != WAITED:
            future.switch_out()
        if self.opens == "bubble" and rounds <= 0 and not future.wait():
            return "nothing"
        while not future.run_to_decision():
            if future.can_start_round(current_step_only=False):
                return "bubble"
            if not future.wait():
                return "nothing"
        return "step"


def follow(start: Moment, until_step: int, planned: Plan, rule: SimpleHelpRule) -> tuple[Plan, Moment]:
    """`simulate_help` from a moment: the bubbles, with the rounds of help in each, and the moment of the end.

    In a large cluster, where a copy takes longer than an instant, it is faster without memory.
    """
    if start.forecast.constants.copied_entries > COPIES_PER_NODE:
        future = start.forecast.copy()
        return simulate_help(future, until_step, planned, rule), Moment(future)
    met: list[PlannedBubble] = []
    coming, moment = iter(planned), start
    while moment.forecast.committed < until_step:
        if moment.opens == "bubble":
            bubble = next(coming, None)
            decided = help_by_rule(moment.forecast, rule) if bubble is None else planned_help(bubble)
            rounds, following = moment.after(decided)
            met.append(PlannedBubble(moment.forecast.now, rounds))
        else:
            _, following = moment.after(None)
        moment = following
        if moment.opens == "nothing":
            break
    return tuple(met), moment
