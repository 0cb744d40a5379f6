"""Chooses how lanes that both generate and train share the work of a step.

Candidates are compared by `step_forecast`: without quotas, for every value of `slices_at_once`; then with quotas
from `quotas`, for steps that take as long as planned or a little longer; then, for the best numbers of slices at
once, with other margins. The search is deterministic, and bounded by the number of its forecasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from digenrl.loop import drive
from digenrl.scheduling import SchedulerState, SharedWorkRule
from digenrl.simulation.quotas import Margins, QuotaPlanner
from digenrl.simulation.step_forecast import StepForecast
from digenrl.simulation.virtual_cluster import VirtualCluster

MOST_AT_ONCE = 8  # slices; larger pieces delay their groups
LONGER = (1.0, 1.01, 1.02, 1.04)  # planned times of a step, relative to the least
REFINED = 3  # numbers of slices at once that are refined
BUDGET = 240  # forecasts

InitialState = Callable[[SharedWorkRule], SchedulerState]  # the start of a run whose lanes follow the rule


def best_rules(initial: InitialState, most_at_once: int, budget: int = BUDGET) -> list[SharedWorkRule]:
    """The rules with the shortest on-policy steps that the search finds: the best, and the best without quotas.

    `most_at_once` is the largest number of slices that a lane may take together.
    """
    return _Search(initial, range(1, min(most_at_once, MOST_AT_ONCE) + 1), budget).run()


def greedy_rule(slices_at_once: int = 1) -> SharedWorkRule:
    """Idle lanes take any available work, slices first."""
    return SharedWorkRule(slices_at_once=slices_at_once, leaves_to_faster=False)


def makespan_ns(initial: SchedulerState) -> int:
    """When the last step is committed, on the scheduler itself."""
    cluster = VirtualCluster(initial)
    drive(initial, cluster)
    return cluster.now_ns


@dataclass(frozen=True, slots=True)
class _Planned:
    """The forecast and the planner for one value of `slices_at_once`."""

    rule: SharedWorkRule
    forecast: StepForecast
    planner: QuotaPlanner


class _Search:
    """The shortest step so far, and what has been tried."""

    def __init__(self, initial: InitialState, sizes: range, budget: int) -> None:
        self._left = budget
        self._tried: set[SharedWorkRule] = set()
        self._best_ns, self._best = 0, SharedWorkRule()
        self._best_by_size: dict[int, int] = {}
        self._plans: dict[int, _Planned] = {}
        for at_once in sizes:
            rule = SharedWorkRule(slices_at_once=at_once)
            forecast = StepForecast(initial(rule))
            self._plans[at_once] = _Planned(rule, forecast, QuotaPlanner.of_forecast(forecast))

    def run(self) -> list[SharedWorkRule]:
        for plan in self._plans.values():
            self._try(plan, plan.rule)
        without_quotas = self._best
        for plan in self._plans.values():
            margins = Margins(tail_ns=plan.planner.last_group_ns)
            least_ns = plan.planner.least_ns(margins)
            for longer in LONGER:
                self._try_quotas(plan, round(longer * least_ns), margins)
        self._refine()
        return list(dict.fromkeys((self._best, without_quotas)))

    def _refine(self) -> None:
        """Plans with random margins. They differ little in time, but much in who does what."""
        sizes = sorted(self._best_by_size, key=lambda size: self._best_by_size[size])[:REFINED]
        plans = [self._plans[size] for size in sizes]
        least_ns = self._best_ns - plans[0].forecast.commit_ns
        for plan, margins, longer in _variants(plans):
            if self._left <= 0:
                return
            self._try_quotas(plan, round(longer * least_ns), margins)

    def _try_quotas(self, plan: _Planned, time_ns: int, margins: Margins) -> None:
        quotas = plan.planner.quotas(time_ns, margins)
        self._try(plan, replace(plan.rule, quotas=quotas))

    def _try(self, plan: _Planned, rule: SharedWorkRule) -> None:
        if rule in self._tried or self._left <= 0:
            return
        self._tried.add(rule)
        self._left -= 1
        step_ns = plan.forecast.step_ns(rule.quotas, stop_ns=self._best_ns)
        size = rule.slices_at_once
        self._best_by_size[size] = min(step_ns, self._best_by_size.get(size, step_ns))
        if not self._best_ns or step_ns < self._best_ns:
            self._best_ns, self._best = step_ns, rule


def _variants(plans: list[_Planned], count: int = 600) -> Iterator[tuple[_Planned, Margins, float]]:
    dice = Random(0)  # the same for every run
    for _ in range(count):
        plan = dice.choice(plans)
        head = dice.choice((0.0, 2 * dice.random()))
        tail = dice.choice((1.0, 2 * dice.random()))
        margins = Margins(round(head * plan.planner.first_piece_ns), round(tail * plan.planner.last_group_ns))
        yield plan, margins, dice.uniform(0.94, 1.03)
