"""Says in words why a plan won or lost, from its own numbers."""

from __future__ import annotations

from digenrl.planning.candidates import Objective
from digenrl.planning.plans import Plan
from digenrl.planning.workload import Workload


def why_it_won(plan: Plan, workload: Workload) -> str:
    """Which side sets the pace of the best plan, and how near it is to the least any schedule could take."""
    side = "training" if plan.step_training_s >= plan.step_generating_s else "generation"
    helped = " and the trainer helps in its bubbles" if plan.spec.policy.help != "none" else ""
    return (
        f"a step of {workload.samples_per_step} samples trains in {plan.step_training_s:.1f} s and generates in "
        f"{plan.step_generating_s:.1f} s: {side} sets the pace{helped}; {plan.efficiency:.0%} of the fluid limit"
    )


def why_it_lost(plan: Plan, best: Plan, objective: Objective = "throughput") -> str:
    """How far behind the best, and the side that holds it back."""
    if objective == "cost":
        behind = plan.usd_per_1000_samples / best.usd_per_1000_samples - 1
        return f"{behind:.1%} dearer: {_cause(plan, best)}"
    behind = best.samples_per_second / plan.samples_per_second - 1
    if behind < 0.0005:
        return f"as fast, at {_price(plan)} per 1,000 samples against {_price(best)}"
    return f"{behind:.1%} slower: {_cause(plan, best)}"


def _price(plan: Plan) -> str:
    return f"${plan.usd_per_1000_samples:.2f}"


def _cause(plan: Plan, best: Plan) -> str:
    trains_slower = plan.step_training_s / best.step_training_s
    generates_slower = plan.step_generating_s / best.step_generating_s
    trainer_bound = plan.step_training_s >= plan.step_generating_s
    if trainer_bound and trains_slower > 1:
        return (
            f"training sets its pace, {plan.step_training_s:.1f} s a step against {best.step_training_s:.1f} s; "
            f"its generators are busy {plan.generator_busy:.0%} of the time"
        )
    if generates_slower > 1:
        return (
            f"generation sets its pace, {plan.step_generating_s:.1f} s a step against "
            f"{best.step_generating_s:.1f} s; its trainer is busy {plan.trainer_busy:.0%} of the time"
        )
    return (
        f"more time is lost between the sides: it reaches {plan.efficiency:.0%} of its fluid limit, "
        f"the best {best.efficiency:.0%} of its own"
    )
