"""Layouts in which cards both generate and train, each on its own: which cards can, and what the others lack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from digenrl.planning.candidates import PlanOptions
from digenrl.planning.costs import TrainerLayout, unit_seconds
from digenrl.planning.facts.cluster import CardPool, Cluster
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import (
    GeneratorLayout,
    Layout,
    best_trainer,
    generator_layout,
    lane_sizes,
    memory_of_shared_card,
)
from digenrl.planning.memory import shared_card_memory


def shared_layouts(
    workload: Workload, cluster: Cluster, job_samples: int, options: PlanOptions
) -> Iterator[Layout]:
    """All cards, and all but those of one pool. The fastest card to train takes the optimizer steps."""
    pools = cluster.pools
    choices = [pools]
    if len(pools) > 1:
        choices += [pools[:index] + pools[index + 1 :] for index in range(len(pools))]
    for choice in choices:
        layout = _shared_layout(workload, choice, job_samples, options)
        if layout is not None:
            yield replace(layout, site_links=cluster.sites)


def lone_trainer(
    workload: Workload, pool: CardPool, job_samples: int, options: PlanOptions
) -> TrainerLayout | None:
    """How one card of the pool trains jobs if it also generates; None if it cannot do both."""
    if _lane(workload, pool, 1, options) is None:
        return None
    if _missing_gib(workload, pool, options):
        return None
    return best_trainer(workload, pool, 1, job_samples, options.capabilities, beside_generation=True)


def shared_slices(workload: Workload, layout: Layout) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Slice sizes for which every card has the memory, or that its measurements cover; and those of each pool."""
    pairs = zip(layout.generators, layout.alone, strict=True)
    by_pool = [_sizes(workload, generator, alone) for generator, alone in pairs]
    trainer = layout.trainer
    own = _sizes(workload, GeneratorLayout(trainer.pool, 1, 1), trainer)
    common = tuple(size for size in workload.slice_sizes() if all(size in sizes for sizes in (own, *by_pool)))
    return common, by_pool


def missing_memory(workload: Workload, cluster: Cluster, options: PlanOptions) -> dict[str, float]:
    """By pool, the GiB that a card lacks to train a pair beside generating a sample; only those that lack any."""
    missing = {pool.name: _missing_gib(workload, pool, options) for pool in cluster.pools}
    return {name: gib for name, gib in missing.items() if gib > 0}


def _missing_gib(workload: Workload, pool: CardPool, options: PlanOptions) -> float:
    """0 if it fits, or if the memory of the card or of the model is not known."""
    if not workload.has_cost_model or not pool.card.described:
        return 0.0
    checkpointing = options.capabilities.checkpointing[-1]
    needed = shared_card_memory(workload, pool.card, 1, 1, checkpointing)
    return max(0.0, needed.total_gib - needed.available_gib)


def _shared_layout(
    workload: Workload, pools: Sequence[CardPool], job_samples: int, options: PlanOptions
) -> Layout | None:
    """These cards, one of which is the trainer; None if no other card can train as well."""
    alone = {pool: lone_trainer(workload, pool, job_samples, options) for pool in pools}
    trainers = [trainer for trainer in alone.values() if trainer is not None]
    if not trainers:
        return None
    first = min(trainers, key=lambda trainer: unit_seconds(workload, trainer, job_samples))
    generators, trains = [], []
    for pool in pools:
        cards = pool.cards - (1 if pool == first.pool else 0)
        lanes = _lane(workload, pool, cards, options)
        if lanes is not None:
            generators.append(lanes)
            trains.append(alone[pool])
    if not any(trains):
        return None
    return Layout(tuple(generators), first, 1, tuple(trains))


def _lane(workload: Workload, pool: CardPool, cards: int, options: PlanOptions) -> GeneratorLayout | None:
    """Lanes of one card each, or None if the model does not fit on one."""
    layout = generator_layout(workload, pool, cards, options.capabilities)
    return layout if layout is not None and layout.lane_cards == 1 else None


def _sizes(workload: Workload, generator: GeneratorLayout, alone: TrainerLayout | None) -> tuple[int, ...]:
    sizes = lane_sizes(workload, generator)
    if alone is None or alone.pool.measured.train_seconds_per_sample is not None:  # measured, and thus fits
        return sizes
    return tuple(size for size in sizes if memory_of_shared_card(workload, alone, size).fits)
