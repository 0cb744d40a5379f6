"""The planner's results, and the reasons why a plan won or lost."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.config.spec import Spec
from digenrl.planning.bounds import Rates
from digenrl.planning.candidates import Objective
from digenrl.planning.layout import Layout
from digenrl.planning.memory import MemoryReport
from digenrl.planning.workload import Workload


@dataclass(frozen=True)
class Plan:
    """One split with its best slices and rules, and the simulator's prediction. `spec` is ready to simulate.

    `step_s` is the time of a step once the pipeline is full. Memory is None where a measurement shows that it
    fits.
    """

    layout: Layout
    rates: Rates
    spec: Spec
    makespan_s: float
    step_s: float
    samples_per_second: float
    efficiency: float
    generator_busy: float
    trainer_busy: float
    usd_per_1000_samples: float
    slices: tuple[int, ...]  # one per pool of layout.generators
    generator_memory: tuple[MemoryReport | None, ...]  # likewise
    trainer_memory: MemoryReport | None
    why: str = ""

    @property
    def step_generating_s(self) -> float:
        """The time that the generators alone need for the samples of a step."""
        return self.rates.samples_per_step / self.rates.samples_per_second

    @property
    def step_training_s(self) -> float:
        return self.rates.step_training_s


@dataclass(frozen=True)
class PlanResult:
    """Plans, best first.

    No plan of the search space with one slice size for all lanes is better than the first by more than
    `proven_gap`; slice sizes per pool are tried for the best splits only. `every_size` is True if all trainer
    sizes were searched, and False if a refined grid of sizes was used (large pools).
    """

    workload: Workload
    plans: tuple[Plan, ...]
    considered: int
    evaluated: int
    proven_gap: float
    every_size: bool

    @property
    def best(self) -> Plan:
        return self.plans[0]


def why_it_won(plan: Plan, workload: Workload) -> str:
    """Which side is the bottleneck of the best plan, and how close the plan is to the fluid limit."""
    side = "training" if plan.step_training_s >= plan.step_generating_s else "generation"
    helped = " and the trainer helps in its bubbles" if plan.spec.policy.help != "none" else ""
    return (
        f"a step of {workload.samples_per_step} samples trains in {plan.step_training_s:.1f} s and generates in "
        f"{plan.step_generating_s:.1f} s: {side} sets the pace{helped}; {plan.efficiency:.0%} of the fluid limit"
    )


def why_it_lost(plan: Plan, best: Plan, objective: Objective = "throughput") -> str:
    """The distance to the best plan, and the bottleneck that causes it."""
    if objective == "cost":
        behind = plan.usd_per_1000_samples / best.usd_per_1000_samples - 1
        return f"{behind:.1%} more expensive: {_cause(plan, best)}"
    behind = best.samples_per_second / plan.samples_per_second - 1
    if behind < 0.0005:
        return f"as fast, at {_price(plan)} per 1,000 samples against {_price(best)}"
    return f"{behind:.1%} slower: {_cause(plan, best)}"


def _price(plan: Plan) -> str:
    return f"${plan.usd_per_1000_samples:.2f}"


def _cause(plan: Plan, best: Plan) -> str:
    trains_slower = plan.step_training_s > best.step_training_s
    generates_slower = plan.step_generating_s > best.step_generating_s
    if trains_slower and plan.step_training_s >= plan.step_generating_s:
        return (
            f"training sets its pace, {plan.step_training_s:.1f} s a step against {best.step_training_s:.1f} s; "
            f"its generators are busy {plan.generator_busy:.0%} of the time"
        )
    if generates_slower:
        return (
            f"generation sets its pace, {plan.step_generating_s:.1f} s a step against "
            f"{best.step_generating_s:.1f} s; its trainer is busy {plan.trainer_busy:.0%} of the time"
        )
    return (
        f"more time is lost between generation and training: it reaches {plan.efficiency:.0%} of its fluid limit, "
        f"the best plan {best.efficiency:.0%}"
    )
