"""Why a plan won or lost, and the comparison of kinds: splits, cards that do both, and colocated cards."""

from __future__ import annotations

from typing import Literal

from digenrl.planning.both_directions import SharedResult
from digenrl.planning.candidates import Objective
from digenrl.planning.facts.workload import Workload
from digenrl.planning.results.plans import Plan

Cause = Literal["waiting", "gathering", "switching", "training", "slow cards", "fewer cards", "gaps"]

SPLIT_KINDS = ("disaggregated", "trainer helps")
SMALL = 0.0005  # a difference that is not shown
NOTICEABLE = 0.005  # a cause that explains something
EXPLAINS = 1 / 2  # of the difference, at least


def why_it_won(plan: Plan, workload: Workload) -> str:
    """Which side is the bottleneck of the best plan, and how close the plan is to the fluid limit."""
    if plan.kind not in SPLIT_KINDS:
        return (
            f"a step of {workload.samples_per_step} samples takes {plan.step_s:.1f} s; {plan.layout.cards} cards "
            f"are busy {_busy(plan):.0%} of the time; {plan.efficiency:.0%} of the fluid limit"
        )
    side = "training" if plan.step_training_s >= plan.step_generating_s else "generation"
    helped = " and the trainer helps in its bubbles" if plan.spec.policy.help != "none" else ""
    return (
        f"a step of {workload.samples_per_step} samples trains in {plan.step_training_s:.1f} s and generates in "
        f"{plan.step_generating_s:.1f} s: {side} sets the pace{helped}; {plan.efficiency:.0%} of the fluid limit"
    )


def why_it_lost(plan: Plan, best: Plan, objective: Objective = "throughput") -> str:
    """The distance to the best plan, and the bottleneck that causes it."""
    behind = _advantage(best, plan, objective)
    if behind < -SMALL:  # colocated cards, which are not a plan to run
        return f"{-behind:.1%} {_better(objective)}: {_why_better(plan, best)}"
    if objective == "cost":
        return f"{behind:.1%} more expensive: {_cause(plan, best)}"
    if behind < SMALL and not plan.usd_per_1000_samples + best.usd_per_1000_samples:
        return "as fast"
    if behind < SMALL:
        return f"as fast, at {_price(plan)} per 1,000 samples against {_price(best)}"
    return f"{behind:.1%} slower: {_cause(plan, best)}"


def compared(split: Plan, shared: SharedResult, colocated: Plan | None, objective: Objective) -> str:
    """Which kind of plan wins, by how much and why; and what colocated cards would do."""
    best = split
    if shared.plan is None:
        why = f"; generators do not train as well: {shared.why_not}" if shared.why_not else ""
        words = f"{split.kind.capitalize()} wins{why}."
    elif _advantage(shared.plan, split, objective) > 0:
        best = shared.plan
        words = _win(shared.plan, split, f"the best split ({split.layout.split})", objective)
    else:
        words = _win(split, shared.plan, "both directions", objective)
    if shared.plan is not None and shared.missing_gib:
        only = " and ".join(f"{name} (lacks {gib:.1f} GiB)" for name, gib in shared.missing_gib.items())
        words += f" A trainer's state does not fit beside generation on {only}."
    return words if colocated is None else f"{words} {_colocated_words(colocated, best, objective)}"


def _win(winner: Plan, loser: Plan, loser_words: str, objective: Objective) -> str:
    ahead = f"{_advantage(winner, loser, objective):.1%} {_better(objective)} than {loser_words}"
    return f"{winner.kind.capitalize()} wins: {ahead}, because {_why_better(winner, loser)}."


def _colocated_words(colocated: Plan, best: Plan, objective: Objective) -> str:
    ahead = _advantage(best, colocated, objective)
    if abs(ahead) < SMALL:
        return "Colocated cards are as good."
    if ahead > 0:
        worse = "more expensive" if objective == "cost" else "slower"
        return f"Colocated cards are {ahead:.1%} {worse}: {_why_worse(colocated, best)}."
    would = f"{_advantage(colocated, best, objective):.1%} {_better(objective)}"
    return (
        f"Colocated cards would be {would}, but DigenRL has no mode in which several cards change together from "
        "generating to training."
    )


def _advantage(better: Plan, worse: Plan, objective: Objective) -> float:
    if objective == "cost":
        return worse.usd_per_1000_samples / better.usd_per_1000_samples - 1
    return better.samples_per_second / worse.samples_per_second - 1


def _better(objective: Objective) -> str:
    return "cheaper" if objective == "cost" else "faster"


def _main_cause(winner: Plan, loser: Plan) -> Cause:
    """The largest of the known causes, each a share of the loser's time."""
    causes: dict[Cause, float] = {
        "waiting": _busy(winner) - _busy(loser),
        "gathering": (_gathering_s(loser) - _gathering_s(winner)) / loser.step_s,
        "switching": _switching_s(loser) / loser.step_s,
        "fewer cards": 1 - loser.layout.cards / winner.layout.cards,
    }
    longer = 1 - _card_seconds(winner) / _card_seconds(loser)
    if winner.layout.trainer.pool.card == loser.layout.trainer.pool.card:
        causes["training"] = longer
    elif loser.kind == "colocated":
        causes["slow cards"] = longer
    cause = max(causes, key=lambda cause: causes[cause])
    lost = 1 - loser.samples_per_second / winner.samples_per_second
    return cause if causes[cause] > max(NOTICEABLE, EXPLAINS * lost) else "gaps"


def _why_better(winner: Plan, loser: Plan) -> str:
    cause = _main_cause(winner, loser)
    split_efficiency = winner.efficiency * winner.makespan_s / loser.makespan_s
    may_be_idle = loser.kind in SPLIT_KINDS and cause in ("waiting", "gaps") and split_efficiency < 1 - NOTICEABLE
    if winner.kind == "both directions" and may_be_idle:
        return (
            f"no split keeps all cards busy: of what they could do at most, the best split does "
            f"{split_efficiency:.0%}, and both directions {winner.efficiency:.0%}"
        )
    return _difference(cause, winner, loser, loser)


def _why_worse(loser: Plan, winner: Plan) -> str:
    return _difference(_main_cause(winner, loser), loser, winner, loser)


def _difference(cause: Cause, plan: Plan, other: Plan, loser: Plan) -> str:
    """The cause in words, said of a plan that is compared with another one; one of them is the loser."""
    there = "" if plan is loser else " there"
    of_a_step = f"s of a step of {loser.step_s:.1f} s{there}"
    words: dict[Cause, str] = {
        "waiting": f"its cards are busy {_busy(plan):.0%} of the time, against {_busy(other):.0%}",
        "gathering": f"adding up gradients and updating weights takes {_gathering_s(loser):.1f} {of_a_step}",
        "switching": f"changes of role take {_switching_s(loser):.1f} {of_a_step}",
        "training": f"a sample trains in {_card_seconds(plan):.3g} card-seconds, against "
        f"{_card_seconds(other):.3g}",
        "slow cards": f"{loser.layout.trainer.pool.card.name} sets the pace of all cards' training{there}",
        "fewer cards": f"{plan.layout.cards} cards are used, not {other.layout.cards}",
        "gaps": f"{'more' if plan is loser else 'less'} time is lost between generation and training",
    }
    return words[cause]


def _busy(plan: Plan) -> float:
    """The share of time in which its cards do anything."""
    if plan.kind == "colocated":
        return min(1.0, plan.generator_busy + plan.trainer_busy)
    trainer = plan.layout.trainer.cards
    generators = plan.layout.cards - trainer
    return (generators * plan.generator_busy + trainer * plan.trainer_busy) / plan.layout.cards


def _card_seconds(plan: Plan) -> float:
    """The training time of a sample, times the cards that it takes."""
    cards = plan.layout.trainer.cards if plan.kind in SPLIT_KINDS else 1
    return float(plan.spec.trainer.seconds_per_sample) * cards


def _gathering_s(plan: Plan) -> float:
    """The time in which no card generates or trains; if the trainer has its own cards, the others do."""
    trainer = plan.spec.trainer
    return 0.0 if plan.kind in SPLIT_KINDS else float(trainer.reduce + trainer.commit)


def _switching_s(plan: Plan) -> float:
    return 2 * float(plan.spec.colocate.switch) if plan.kind == "colocated" else 0.0


def _price(plan: Plan) -> str:
    return f"${plan.usd_per_1000_samples:.2f}"


def _cause(plan: Plan, best: Plan) -> str:
    if plan.kind not in SPLIT_KINDS or best.kind not in SPLIT_KINDS:
        return _why_worse(plan, best)
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
    reached, best_reached = f"{plan.efficiency:.0%}", f"{best.efficiency:.0%}"
    if reached == best_reached:
        return (
            f"its cards could do {plan.samples_per_second / plan.efficiency:.3g} samples per s at most, those of "
            f"the best plan {best.samples_per_second / best.efficiency:.3g}"
        )
    return (
        f"more time is lost between generation and training: it reaches {reached} of its fluid limit, the best "
        f"plan {best_reached}"
    )
