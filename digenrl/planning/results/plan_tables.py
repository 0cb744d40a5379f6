"""Plans as terminal tables and as plain dictionaries for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from digenrl.config.reading import mapped
from digenrl.planning.facts.workload import Workload
from digenrl.planning.memory import MemoryReport
from digenrl.planning.results.plans import Plan, PlanResult


def plans_table(plans: Sequence[Plan], colocated: Plan | None = None) -> Table:
    """The plans, best first, one row each, then colocated cards; `plan_reasons` go below the table."""
    table = Table(title="Plans, best first", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("")
    table.add_column("plan", ratio=1)
    rows = [(str(rank), plan) for rank, plan in enumerate(plans, start=1)]
    rows += [] if colocated is None else [("-", colocated)]
    priced = any(plan.usd_per_1000_samples for _, plan in rows)
    headings = (
        "samples\nper s",
        "s per\nstep",
        "gen.\nbusy",
        "train.\nbusy",
        *(["$ per\n1,000"] if priced else []),
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, plan in rows:
        title = f"{plan.kind}: {plan.layout.split}"
        table.add_row(
            rank,
            "\n".join((title, rule_words(plan), trainer_words(plan), memory_words(plan))),
            rate_words(plan.samples_per_second),
            rate_words(plan.step_s),
            f"{plan.generator_busy:.0%}",
            f"{plan.trainer_busy:.0%}",
            *([f"{plan.usd_per_1000_samples:.2f}"] if priced else []),
        )
    return table


def plan_reasons(plans: Sequence[Plan]) -> list[str]:
    """One line per plan: why the first won, and why the others lost."""
    return [f"{rank}. {plan.why}" for rank, plan in enumerate(plans, start=1)]


def trainer_words(plan: Plan) -> str:
    """'8 ranks: pack 4, checkpointing, weights over 8 cards'."""
    trainer = plan.layout.trainer
    if plan.layout.alone and plan.trainer_memory is not None:
        checkpointing = ", checkpointing" if trainer.checkpointing else ""
        return f"every card alone: jobs of {plan.spec.trainer.job}, pack {trainer.pack}{checkpointing}"
    ranks = f"{trainer.cards} rank{'s' if trainer.cards > 1 else ''}"
    if plan.trainer_memory is None:
        return f"{ranks}: as measured"
    weights = "a copy per card" if trainer.shard_cards == 1 else f"weights over {trainer.shard_cards} cards"
    checkpointing = "checkpointing, " if trainer.checkpointing else ""
    together = "" if trainer.replica_cards == 1 else f", {trainer.replica_cards} cards per sample"
    return f"{ranks}: pack {trainer.pack}, {checkpointing}{weights}{together}"


def rule_words(plan: Plan) -> str:
    """'slices of 2 (H100 8), group stream, help auto, stale 0.5'."""
    rules = plan.spec.policy
    if rules.colocated:
        return slice_words(plan)
    stale = f"stale {rules.stale_fraction}" if rules.stale_fraction else "on-policy"
    dispatch = ", earliest finish" if rules.dispatch == "earliest_finish" else ""
    return f"{slice_words(plan)}, {rules.stream} stream, help {rules.help}, {stale}{dispatch}"


def slice_words(plan: Plan) -> str:
    """'slices of 2', with the pools that generate larger ones in brackets: 'slices of 2 (H100 8)'."""
    pools = zip(plan.layout.generators, plan.slices, strict=True)
    larger = [f"{generator.pool.name} {own}" for generator, own in pools if own != plan.spec.slice]
    return f"slices of {plan.spec.slice}" + (f" ({', '.join(larger)})" if larger else "")


def memory_words(plan: Plan) -> str:
    """'GiB a card: generators 26 of 44, trainer 71 of 73'."""
    if plan.trainer_memory is None and not any(plan.generator_memory):
        return "memory as measured"
    if not plan.generator_memory:
        return f"GiB a card, training: {_memory_words(plan.trainer_memory)}"
    generators = " and ".join(_memory_words(memory) for memory in plan.generator_memory)
    return f"GiB a card: generators {generators}, trainer {_memory_words(plan.trainer_memory)}"


def rate_words(rate: float) -> str:
    """Three significant digits, or a whole number if larger: 0.0123, 4.56, 1,163."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """A plan for JSON; `spec` can be parsed as a SPEC."""
    trainer = plan.layout.trainer
    return {
        "kind": plan.kind,
        "split": plan.layout.split,
        "generators": [
            {
                "card": g.pool.name,
                "cards": g.cards,
                "lanes": g.lanes,
                "slice": own,
                "memory": _memory_dict(memory),
            }
            for g, own, memory in zip(plan.layout.generators, plan.slices, plan.generator_memory, strict=True)
        ],
        "trainer": {
            "card": trainer.pool.name,
            "cards": trainer.cards,
            "shard_cards": trainer.shard_cards,
            "pack": trainer.pack,
            "checkpointing": trainer.checkpointing,
            "memory": _memory_dict(plan.trainer_memory),
        },
        "samples_per_second": plan.samples_per_second,
        "makespan": plan.makespan_s,
        "step_seconds": plan.step_s,
        "efficiency": plan.efficiency,
        "generator_busy": plan.generator_busy,
        "trainer_busy": plan.trainer_busy,
        "usd_per_1000_samples": plan.usd_per_1000_samples,
        "why": plan.why,
        "spec": spec_as_dict(plan),
    }


def result_as_dict(result: PlanResult) -> dict[str, Any]:
    return {
        "workload": result.workload.model_dump(mode="json"),
        "costs": cost_source(result.workload),
        "considered": result.considered,
        "evaluated": result.evaluated,
        "proven_gap": result.proven_gap,
        "every_size": result.every_size,
        "comparison": result.comparison,
        "trainer_places": [asdict(place) for place in result.trainer_places],
        "plans": [plan_as_dict(plan) for plan in result.plans],
        "colocated": None if result.colocated is None else plan_as_dict(result.colocated),
    }


def cost_source(workload: Workload) -> str:
    """The source of the model's costs: catalog, derived (from its layers), or measured only."""
    if workload.model_facts is None:
        return "measured"
    return "catalog" if workload.model_facts.fitted else "derived"


def spec_as_dict(plan: Plan) -> dict[str, Any]:
    """The plan's SPEC with plain numbers, for YAML or JSON, without absent parts."""
    content: dict[str, Any] = mapped(plan.spec.model_dump(mode="python", exclude_none=True), _plain)
    if not plan.spec.policy.colocated:
        content.pop("colocate", None)
    return content


def _plain(value: Any) -> Any:
    """A decimal as int or float."""
    if isinstance(value, int | str | bool):
        return value
    number = float(value)
    return int(number) if number == int(number) and abs(number) < 1e15 else number


def _memory_words(memory: MemoryReport | None) -> str:
    if memory is None:
        return "as measured"
    return f"{memory.total_gib:.0f} of {memory.available_gib:.0f}"


def _memory_dict(memory: MemoryReport | None) -> dict[str, float] | None:
    if memory is None:
        return None
    names = ("weights_gib", "optimizer_gib", "activations_gib", "total_gib", "available_gib")
    return {name: round(getattr(memory, name), 2) for name in names}
