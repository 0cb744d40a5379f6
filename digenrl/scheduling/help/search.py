"""BTS: how many rounds of help, at this bubble and the following ones, bring the step's commit forward most.

A depth-first search over round counts, fewest first, in exact futures. A branch is cut when not even the best
imaginable rest could beat the best plan known, or when an equal state was seen before. It stops at its budget with
the best plan found so far, which is never worse, by prediction, than not helping.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from digenrl.records import LaneOffer
from digenrl.scheduling.help.forecast import Forecast
from digenrl.scheduling.help.forecast_facts import NEVER
from digenrl.scheduling.help.help_rules import STEP_RULES, WAIT_ALWAYS, HelpRule, play
from digenrl.scheduling.state import PlannedBubble

Plan = tuple[PlannedBubble, ...]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plan for the rest of the current step; bubbles beyond it are waited through."""

    bubbles: Plan
    commit_ns: int
    exact: bool  # the budget sufficed: no plan has an earlier commit, and no equal one has fewer rounds first


def search_help(bubble: Forecast, budget: int, known: Plan = ()) -> SearchResult:
    """Searches from a bubble of the current step, looking at about `budget` nodes: instants of possible futures.

    `known` is an earlier plan from here on, if there is one.
    """
    hunt = _Search(bubble, budget)
    if known:
        hunt.offer(known, WAIT_ALWAYS)
    # A plan without an end is none: the trainer may be the only one left that can generate.
    for rule in STEP_RULES:
        if not hunt.exhausted or hunt.best_commit_ns == NEVER:
            hunt.offer((), rule)
    exact = hunt.run()
    return SearchResult(hunt.best_plan, hunt.best_commit_ns, exact)


class _Search:
    """The search's memory: the best plan so far, the states seen, the budget."""

    def __init__(self, bubble: Forecast, budget: int) -> None:
        self.best_plan: Plan = ()
        self.best_commit_ns = NEVER
        self._bubble = bubble
        self._last_node = bubble.meter.nodes + budget
        self._seen: set[tuple[object, ...]] = set()
        self._found_by_search = False

    @property
    def exhausted(self) -> bool:
        """The budget is spent."""
        return self._bubble.meter.nodes > self._last_node

    def offer(self, plan: Plan, rule: HelpRule) -> None:
        """A way from elsewhere: it sets the mark, but an equally early one found in order replaces it."""
        future = self._bubble.fork()
        plan = play(future, self._bubble.committed + 1, plan, rule)
        if future.now < self.best_commit_ns:
            self.best_plan, self.best_commit_ns = plan, future.now

    def run(self) -> bool:
        """Depth first, with an explicit stack: a step can have more bubbles than the interpreter has frames.

        Returns whether everything was looked at.
        """
        stack: list[tuple[Iterator[tuple[int, Forecast]], Plan, int]] = []
        stack.append((_branches(self._bubble.fork()), (), self._bubble.now))
        while stack:
            if self.exhausted:
                return False
            branches, prefix, opens_ns = stack[-1]
            branch = next(branches, None)
            if branch is None:
                stack.pop()
                continue
            rounds, future = branch
            plan = (*prefix, PlannedBubble(opens_ns, rounds))
            if self._worth_following(future, plan):
                stack.append((_branches(future), plan, future.now))
        return True

    def _worth_following(self, future: Forecast, plan: Plan) -> bool:
        """Plays on to the next choice; records a commit, or tells whether the bubble deserves a look."""
        while not future.run_to_decision():
            if future.current_step_unstarted():
                break
            if not future.wait():
                return False
        else:
            self._record(plan, future.now)
            return False
        if self._beaten(least_commit_ns(future)):
            return False
        key = future.key()
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def _beaten(self, commit_ns: int) -> bool:
        return commit_ns >= self.best_commit_ns + (not self._found_by_search)

    def _record(self, plan: Plan, commit_ns: int) -> None:
        if not self._beaten(commit_ns):
            self.best_plan, self.best_commit_ns, self._found_by_search = plan, commit_ns, True


def _branches(bubble: Forecast) -> Iterator[tuple[int, Forecast]]:
    """The futures after waiting, after one round of help, after two, and so on; consumes `bubble`."""
    waited = bubble.fork()
    if waited.wait():
        yield 0, waited
    bubble.switch_in()
    rounds = 0
    while bubble.can_start_round(current_step_only=True):
        bubble.round()
        rounds += 1
        returned = bubble.fork()
        returned.switch_out()
        yield rounds, returned


def least_commit_ns(bubble: Forecast) -> int:
    """No plan from this bubble can commit before this.

    The trainer still has its units to train; and the last slice, even if all lanes work without a pause, ends at
    some time after which at least one unit is left to train.
    """
    facts = bubble.facts
    untrained = facts.units - bubble.trained
    last_units = untrained if facts.batch else 1
    by_training = bubble.now + untrained * facts.unit_ns
    by_generating = _least_last_end_ns(bubble) + last_units * facts.unit_ns
    return max(by_training, by_generating) + facts.commit_ns


def _least_last_end_ns(bubble: Forecast) -> int:
    """The last slice of the step cannot end before this, if work were fluid and help began at once."""
    facts = bubble.facts
    last_end = bubble.now
    rate, lost = 0.0, 0.0  # slices per ns of all lanes together; slices not made while lanes are still busy
    for end, _, lane_class, step, lanes, _ in bubble.running:
        if step == bubble.committed:
            last_end = max(last_end, end)
        if lane_class >= 0:
            speed = lanes / best_slice_ns(facts.classes[lane_class])
            rate += speed
            lost += speed * (end - bubble.now)
    for lane_class, idle in enumerate(bubble.idle):
        rate += idle / best_slice_ns(facts.classes[lane_class])
    helper_rate = facts.helpers / best_slice_ns(facts.helper)
    rate += helper_rate
    lost += helper_rate * facts.switch_in_ns
    unstarted = bubble.current_step_unstarted()
    if not unstarted:
        return last_end
    # Lanes that are busy past the end lose less than counted: leave them out until the estimate holds.
    fluid_ns = (unstarted + lost) / rate
    slowest_ns = max((end - bubble.now for end, _, kind, _, _, _ in bubble.running if kind >= 0), default=0)
    if fluid_ns < max(slowest_ns, facts.switch_in_ns):
        fluid_ns = unstarted / rate
    return max(last_end, bubble.now + int(fluid_ns * (1 - 1e-9)))


def best_slice_ns(offer: LaneOffer) -> float:
    """The least time for one slice that a lane reaches, whatever it takes at once."""
    if offer.slices_at_once == 1:
        return offer.slice_ns
    return min(offer.expected_ns(slices) / slices for slices in range(1, offer.slices_at_once + 1))
