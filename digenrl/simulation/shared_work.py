"""Chooses how lanes that both generate and train share the work of a step.

Candidates are compared by `step_forecast`: without pieces, for every value of `slices_at_once`; then with pieces
that are quotas from `quotas`, for steps that take as long as planned or a little longer; then, for the best
numbers of slices at once, with other margins; then with pieces that are changed at random (`piece_search`). The
search is deterministic, and bounded by the number of its forecasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from digenrl.loop import drive
from digenrl.records import Action, Committed, Event
from digenrl.scheduling import SchedulerState, SharedWorkRule, Terms
from digenrl.simulation.piece_search import improved
from digenrl.simulation.quotas import Margins, QuotaPlanner
from digenrl.simulation.step_forecast import StepForecast
from digenrl.simulation.virtual_cluster import VirtualCluster

MOST_AT_ONCE = 8  # slices; larger pieces delay their groups
LONGER = (1.0, 1.01, 1.02, 1.04)  # planned times of a step, relative to the least
WAYS = (  # the first one is best if there are many slices
    SharedWorkRule(strict=False),
    SharedWorkRule(),
    SharedWorkRule(leaves_to_faster=False),
)
REFINED = 3  # numbers of slices at once that are refined
BUDGET = 480  # forecasts of rules from quotas
CLOSE = 1.01  # times the best step of rules from quotas: changed rules with longer steps are dropped
FAR = 1.1  # times the best step so far: longer ones are not forecast to their end
CHANGED = 4  # rules from which random changes start
CHANGES = 1600  # forecasts of changed rules, at most
CHANGED_WORK = 300_000  # slices and Train jobs in all of these forecasts together

LATE_SHARES = (0.25, 0.5, 0.75)
COMPARED_STEPS = (4, 16)  # at least, and at most with stale samples: lanes may get further ahead in every step
COMPARED_SAMPLES = 1024  # in these steps

InitialState = Callable[[SharedWorkRule], SchedulerState]  # the start of a run whose lanes follow the rule


def best_rules(
    initial: InitialState, most_at_once: int, budget: int = BUDGET, changes: int = CHANGES
) -> list[SharedWorkRule]:
    """A few rules with short on-policy steps, the best first; among them the best without pieces.

    `most_at_once` is the largest number of slices that a lane may take together. The search makes `budget`
    forecasts, and up to `changes` more. The first step of a run may differ from the others, which are compared.
    """
    search = _Search(initial, range(1, min(most_at_once, MOST_AT_ONCE) + 1), budget)
    without_pieces = search.best_without_pieces()
    search.try_quotas()
    from_quotas = search.best()
    limit_ns = CLOSE * search.step_ns(from_quotas)
    changed = [rule for rule in search.change_pieces(changes) if search.step_ns(rule) <= limit_ns]
    return sorted(dict.fromkeys((from_quotas, without_pieces, *changed)), key=search.step_ns)


def best_stale_work(
    rules: Sequence[SharedWorkRule], terms: Terms, expected_ns: Callable[[SharedWorkRule], int]
) -> SharedWorkRule:
    """The fastest rule: as it is, with fewer stale samples than the run allows, or with some that may end late.

    A lane that works ahead may be busy when the current step needs it. But if it never is, it often waits for a
    commit for almost as long as a slice takes.
    """
    limits = [quarters * terms.samples_per_step // 4 for quarters in reversed(range(4))]
    limited = [replace(rule, most_stale=most) for most in limits if most < terms.stale_budget for rule in rules]
    best = _fastest([*rules, *limited], expected_ns)
    if not terms.stale_budget or best.most_stale == 0:
        return best
    return _fastest([best, *(replace(best, late_share=share) for share in LATE_SHARES)], expected_ns)


def compared_steps(terms: Terms) -> int:
    """How many steps are simulated to compare rules: more of small ones if lanes may work ahead."""
    least, most = COMPARED_STEPS
    if terms.stale_budget:
        least = max(least, min(most, COMPARED_SAMPLES // terms.samples_per_step))
    return min(terms.steps, least)


def _fastest(rules: Sequence[SharedWorkRule], expected_ns: Callable[[SharedWorkRule], int]) -> SharedWorkRule:
    return rules[0] if len(rules) == 1 else min(rules, key=expected_ns)


def greedy_rule(slices_at_once: int = 1) -> SharedWorkRule:
    """Idle lanes take any available work, slices first."""
    return SharedWorkRule(slices_at_once=slices_at_once, leaves_to_faster=False)


def makespan_ns(initial: SchedulerState) -> int:
    """When the last step is committed, on the scheduler itself."""
    cluster = VirtualCluster(initial)
    drive(initial, cluster)
    return cluster.now_ns


def commit_ends_ns(initial: SchedulerState) -> list[int]:
    """When each step is committed, on the scheduler itself."""
    commits = _CommitEnds()
    drive(initial, VirtualCluster(initial), (commits,))
    return commits.ends_ns


@dataclass(slots=True)
class _CommitEnds:
    """An observer that notes when steps are committed."""

    ends_ns: list[int] = field(default_factory=list)

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        if isinstance(event, Committed):
            self.ends_ns.append(event.at_ns)


@dataclass(frozen=True, slots=True)
class _Planned:
    """The forecast and the planner for one value of `slices_at_once`."""

    rule: SharedWorkRule
    forecast: StepForecast
    planner: QuotaPlanner


class _Search:
    """The rules that have been tried, and the times of their steps."""

    def __init__(self, initial: InitialState, sizes: range, budget: int) -> None:
        self._left = budget
        self._steps_ns: dict[SharedWorkRule, int] = {}
        self._plans: dict[int, _Planned] = {}
        for at_once in sizes:
            rule = SharedWorkRule(slices_at_once=at_once)
            forecast = StepForecast(initial(rule))
            self._plans[at_once] = _Planned(rule, forecast, QuotaPlanner.of_forecast(forecast))

    def best_without_pieces(self) -> SharedWorkRule:
        for plan in self._plans.values():
            self._try(plan, plan.rule)
        return self.best()

    def try_quotas(self) -> None:
        """Plans with the usual margins, then with random ones, which change who does what."""
        for plan in self._plans.values():
            margins = Margins(tail_ns=plan.planner.last_group_ns)
            least_ns = plan.planner.least_ns(margins)
            for longer in LONGER:
                for way in WAYS:
                    self._try_quotas(plan, round(longer * least_ns), margins, way, cut=False)
        plans = [self._plans[rule.slices_at_once] for rule in self._best_by_size()[:REFINED]]
        least_ns = self.step_ns(self.best()) - plans[0].forecast.commit_ns
        for plan, margins, longer, way, cut in _variants(plans):
            if self._left <= 0:
                return
            self._try_quotas(plan, round(longer * least_ns), margins, way, cut=cut)

    def change_pieces(self, changes: int) -> list[SharedWorkRule]:
        """Changes what lanes generate by the best rules. They may take pieces of all sizes then."""
        largest = self._plans[max(self._plans)]
        changes = min(changes, CHANGED_WORK // (largest.planner.slices + largest.planner.jobs))
        starts = self._best_by_size()[:CHANGED]
        found = []
        for start in starts if changes else ():
            pieces = tuple(map(tuple, self._plans[start.slices_at_once].forecast.run(start).pieces))
            rule = replace(start, pieces=pieces, slices_at_once=largest.rule.slices_at_once)
            rule = improved(largest.forecast, rule, changes // len(starts))
            self._steps_ns[rule] = largest.forecast.step_ns(rule)
            found.append(rule)
        return found

    def _best_by_size(self) -> list[SharedWorkRule]:
        """The best rule for each number of slices at once, the best of all first."""
        best: dict[int, SharedWorkRule] = {}
        for rule in sorted(self._steps_ns, key=self.step_ns):
            best.setdefault(rule.slices_at_once, rule)
        return list(best.values())

    def best(self) -> SharedWorkRule:
        return min(self._steps_ns, key=self.step_ns)

    def step_ns(self, rule: SharedWorkRule) -> int:
        return self._steps_ns[rule]

    def _try_quotas(
        self, plan: _Planned, time_ns: int, margins: Margins, way: SharedWorkRule, *, cut: bool
    ) -> None:
        """A lane's quota is one piece, whose jobs end with their groups, or cut into pieces of any groups."""
        at_once, quotas = plan.rule.slices_at_once, plan.planner.quotas(time_ns, margins)
        pieces = tuple(_cut(quota, at_once if cut else max(1, quota)) for quota in quotas)
        self._try(plan, replace(way, pieces=pieces, slices_at_once=at_once))

    def _try(self, plan: _Planned, rule: SharedWorkRule) -> None:
        if rule not in self._steps_ns and self._left > 0:
            self._left -= 1
            self._steps_ns[rule] = plan.forecast.step_ns(rule, stop_ns=self._stop_ns())

    def _stop_ns(self) -> int:
        """A step that takes this long is too long to be of interest."""
        return round(FAR * min(self._steps_ns.values(), default=0))


def _cut(slices: int, at_once: int) -> tuple[int, ...]:
    """Pieces of almost equal size, the larger ones first.

    >>> _cut(7, at_once=3)
    (3, 2, 2)
    """
    pieces = -(-slices // at_once)
    return tuple((slices + pieces - 1 - place) // pieces for place in range(pieces))


def _variants(
    plans: list[_Planned], count: int = 600
) -> Iterator[tuple[_Planned, Margins, float, SharedWorkRule, bool]]:
    dice = Random(0)  # the same for every run
    for _ in range(count):
        plan = dice.choice(plans)
        head = dice.choice((0.0, 2 * dice.random()))
        tail = dice.choice((1.0, 2 * dice.random()))
        margins = Margins(round(head * plan.planner.first_piece_ns), round(tail * plan.planner.last_group_ns))
        longer = dice.uniform(0.94, 1.03)
        if dice.random() < 0.5:
            yield plan, margins, longer, WAYS[0], False
        else:
            yield plan, margins, longer, dice.choice(WAYS), dice.random() < 0.5
