"""BTS: how many rounds of help, at this bubble and the following ones, bring the step's commit forward most.

A depth-first search over round counts, fewest first, in exact futures. A branch is cut when not even the best
imaginable rest could beat the best plan known, or when an equal state was seen before. It stops at its budget of
nodes with the best plan found so far, which is never worse, by prediction, than not helping.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from digenrl.scheduling.forecast import NEVER, Forecast
from digenrl.scheduling.state import PlannedBubble


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plan for the rest of the current step; bubbles beyond it are waited through."""

    bubbles: tuple[PlannedBubble, ...]
    commit_ns: int
    exact: bool  # the budget sufficed: no plan has an earlier commit, and no equal one has fewer rounds first


def search_help(bubble: Forecast, nodes: int, known: tuple[PlannedBubble, ...] = ()) -> SearchResult:
    """Searches from a bubble of the current step; `known` is an earlier plan from here, if there is one."""
    hunt = _Hunt(nodes)
    for rounds_at_each, stop_when_ready in ((0, True), (1, True), (1 << 30, True)):
        hunt.offer(*_play_rule(bubble.fork(), rounds_at_each, stop_when_ready))
    if known:
        hunt.offer(*_play_plan(bubble.fork(), known))
    hunt.run(bubble)
    return SearchResult(hunt.best_plan, hunt.best_commit_ns, exact=hunt.nodes_left > 0)


class _Hunt:
    """The search's memory: the best plan so far, the states seen, the budget."""

    def __init__(self, nodes: int) -> None:
        self.nodes_left = nodes
        self.best_plan: tuple[PlannedBubble, ...] = ()
        self.best_commit_ns = NEVER
        self._seen: set[tuple[object, ...]] = set()
        self._found_by_search = False

    def offer(self, plan: tuple[PlannedBubble, ...], commit_ns: int) -> None:
        """A plan from elsewhere: it sets the mark, but an equally early one found in order replaces it."""
        if commit_ns < self.best_commit_ns:
            self.best_plan, self.best_commit_ns = plan, commit_ns

    def run(self, bubble: Forecast) -> None:
        """Depth first with an explicit stack: a step can have more bubbles than the interpreter has frames."""
        stack: list[tuple[Iterator[tuple[int, Forecast]], tuple[PlannedBubble, ...], int]] = []
        stack.append((_branches(bubble.fork()), (), bubble.now))
        while stack and self.nodes_left > 0:
            branches, prefix, opens_ns = stack[-1]
            branch = next(branches, None)
            if branch is None:
                stack.pop()
                continue
            self.nodes_left -= 1
            rounds, future = branch
            plan = (*prefix, PlannedBubble(opens_ns, rounds))
            if self._worth_following(future, plan):
                stack.append((_branches(future), plan, future.now))

    def _worth_following(self, future: Forecast, plan: tuple[PlannedBubble, ...]) -> bool:
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

    def _record(self, plan: tuple[PlannedBubble, ...], commit_ns: int) -> None:
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

    The trainer still has its units to train; and the last slice, if all lanes worked without a pause, ends at
    some time after which at least one unit is left to train.
    """
    facts = bubble.facts
    untrained = facts.units - bubble.trained
    by_training = bubble.now + untrained * facts.unit_ns
    unstarted = bubble.current_step_unstarted()
    rate, head_start = 0.0, 0.0  # slices per ns of all lanes; slices lost to lanes that are busy until later
    last_end = bubble.now
    for end, _, lane_class, step, groups in bubble.running:
        if step == bubble.committed:
            last_end = max(last_end, end)
        if lane_class >= 0:
            speed = len(groups) / facts.class_ns[lane_class]
            rate += speed
            head_start += speed * (end - bubble.now)
    for lane_class, idle in enumerate(bubble.idle):
        rate += idle / facts.class_ns[lane_class]
    rate += facts.helpers / facts.helper_ns
    head_start += facts.helpers / facts.helper_ns * min(facts.switch_in_ns, facts.helper_ns)
    fluid_end = bubble.now + int((unstarted + head_start) / rate * (1 - 1e-9)) if unstarted and rate else 0
    last_units = untrained if facts.batch else 1
    by_generating = max(last_end, fluid_end) + last_units * facts.unit_ns
    return max(by_training, by_generating) + facts.commit_ns


def _play_rule(
    future: Forecast, rounds_at_each: int, stop_when_ready: bool
) -> tuple[tuple[PlannedBubble, ...], int]:
    """Follows a simple rule to the commit: at each bubble at most so many rounds."""
    plan: list[PlannedBubble] = []
    while True:
        opens_ns, rounds = future.now, 0
        if rounds_at_each and future.current_step_unstarted():
            future.switch_in()
            while rounds < rounds_at_each and future.can_start_round(current_step_only=True):
                if rounds and stop_when_ready and future.ready:
                    break
                future.round()
                rounds += 1
            future.switch_out()
        elif not future.wait():
            return (), NEVER
        plan.append(PlannedBubble(opens_ns, rounds))
        if future.run_to_decision():
            return tuple(plan), future.now


def _play_plan(future: Forecast, plan: tuple[PlannedBubble, ...]) -> tuple[tuple[PlannedBubble, ...], int]:
    """Follows an earlier plan to the commit, with the bubbles' times as they are predicted now."""
    played: list[PlannedBubble] = []
    rest = iter(plan)
    while True:
        opens_ns, rounds = future.now, 0
        wanted = next(rest, PlannedBubble(0, 0)).rounds if future.current_step_unstarted() else 0
        if wanted:
            future.switch_in()
            while rounds < wanted and future.can_start_round(current_step_only=True):
                future.round()
                rounds += 1
            future.switch_out()
        elif not future.wait():
            return (), NEVER
        played.append(PlannedBubble(opens_ns, rounds))
        if future.run_to_decision():
            return tuple(played), future.now
