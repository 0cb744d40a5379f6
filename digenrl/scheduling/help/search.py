"""BTS: how many rounds of help, at this bubble and the following ones, lead to the earliest commit of the step.

A depth-first search over numbers of rounds, fewest first, in exact forecasts. A branch is cut if a lower bound
shows that it cannot beat the best known plan, or if an equal state was visited before. When its budget is spent,
the search returns the best plan so far, which by prediction is never worse than not helping.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from digenrl.records import LaneOffer
from digenrl.scheduling.help.forecast import Forecast
from digenrl.scheduling.help.forecast_constants import NEVER
from digenrl.scheduling.help.futures import Moment, follow
from digenrl.scheduling.help.help_rules import STEP_RULES, WAIT_ALWAYS, Plan, SimpleHelpRule
from digenrl.scheduling.state import PlannedBubble


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plan for the rest of the current step. The trainer waits in bubbles beyond it."""

    bubbles: Plan
    exact: bool  # the search was complete: no plan commits earlier, and no equal plan has fewer rounds first


def search_help(bubble: Forecast, budget: int, known: Plan = (), start: Moment | None = None) -> SearchResult:
    """Searches from a bubble of the current step. Visits about `budget` nodes, which are instants of forecasts.

    `known` is the rest of an earlier plan; `start` has the futures from this bubble that were simulated before.
    """
    search = _Search(start or Moment(bubble), budget)
    if known:
        search.try_plan(known, WAIT_ALWAYS)
    # A plan that never ends is not accepted even without budget: perhaps only the trainer can generate.
    for rule in STEP_RULES:
        if not search.exhausted or search.best_commit_ns == NEVER:
            search.try_plan((), rule)
    exact = search.run()
    return SearchResult(search.best_plan, exact)


class _Search:
    """The best plan so far, the states visited, and the budget."""

    def __init__(self, start: Moment, budget: int) -> None:
        self.best_plan: Plan = ()
        self.best_commit_ns = NEVER
        self._start, self._bubble = start, start.forecast
        self._last_node = self._bubble.counter.nodes + budget
        self._seen: set[tuple[object, ...]] = set()
        self._found_by_search = False

    @property
    def exhausted(self) -> bool:
        """Whether the budget is spent."""
        return self._bubble.counter.nodes > self._last_node

    def try_plan(self, plan: Plan, rule: SimpleHelpRule) -> None:
        """Simulates a supplied plan, which may become the best. An equal plan of the search replaces it."""
        self._bubble.count_fork()
        plan, end = follow(self._start, self._bubble.committed + 1, plan, rule)
        if end.forecast.now < self.best_commit_ns:
            self.best_plan, self.best_commit_ns = plan, end.forecast.now

    def run(self) -> bool:
        """Searches depth first, with an explicit stack since a step can have very many bubbles.

        Returns whether the search was complete.
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
        """Simulates up to the next bubble and returns whether to search there; records a commit."""
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
    """The futures after waiting, after one round of help, after two, and so on. Advances `bubble`."""
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
    """A lower bound of the commit time of any plan from this bubble.

    The trainer has to train its remaining units. And after the end of the last slice, even if all lanes work
    without idle time, at least one unit is left to train.
    """
    constants = bubble.constants
    untrained = constants.units - bubble.trained
    last_units = untrained if constants.batch else 1
    by_training = bubble.now + untrained * constants.unit_ns
    by_generating = _least_last_end_ns(bubble) + last_units * constants.unit_ns
    return max(by_training, by_generating) + constants.commit_ns


def _least_last_end_ns(bubble: Forecast) -> int:
    """A lower bound of the end of the step's last slice: work is fluid and help starts at once."""
    constants = bubble.constants
    last_end = bubble.now
    rate, lost = 0.0, 0.0  # slices per ns of all lanes together; slices not generated while lanes are still busy
    for end, _, lane_class, step, lanes, _ in bubble.running:
        if step == bubble.committed:
            last_end = max(last_end, end)
        if lane_class >= 0:
            speed = lanes / best_slice_ns(constants.classes[lane_class])
            rate += speed
            lost += speed * (end - bubble.now)
    for lane_class, idle in enumerate(bubble.idle):
        rate += idle / best_slice_ns(constants.classes[lane_class])
    helper_rate = constants.helpers / best_slice_ns(constants.helper)
    rate += helper_rate
    lost += helper_rate * constants.switch_in_ns
    unstarted = bubble.current_step_unstarted()
    if not unstarted:
        return last_end
    # Lanes that are busy beyond this time lose less than was counted, so nothing is counted as lost.
    fluid_ns = (unstarted + lost) / rate
    slowest_ns = max((end - bubble.now for end, _, kind, _, _, _ in bubble.running if kind >= 0), default=0)
    if fluid_ns < max(slowest_ns, constants.switch_in_ns):
        fluid_ns = unstarted / rate
    return max(last_end, bubble.now + int(fluid_ns * (1 - 1e-9)))


def best_slice_ns(offer: LaneOffer) -> float:
    """The shortest time per slice that a lane reaches, over all numbers of slices it can take at once."""
    if offer.slices_at_once == 1:
        return offer.slice_ns
    return min(offer.expected_ns(slices) / slices for slices in range(1, offer.slices_at_once + 1))
