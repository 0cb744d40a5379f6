"""Who does what: the cards that generate, in lanes, and the cards that train, as one group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil

from digenrl.planning.cluster import CardPool
from digenrl.planning.constants import CONSTANTS, Constants
from digenrl.planning.costs import TrainerLayout, commit_seconds, unit_seconds
from digenrl.planning.memory import (
    MemoryReport,
    generator_memory,
    smallest_lane,
    trainer_memory,
)
from digenrl.planning.workload import Workload

# Fewer shards and smaller packs leave memory free and make helping cheaper: worth this much of the trainer's time.
SIMPLER_MAY_COST = 0.01


@dataclass(frozen=True, slots=True)
class GeneratorLayout:
    """Cards of one pool that generate: one lane per card, or per tensor-parallel set where a card is too small."""

    pool: CardPool
    cards: int
    lane_cards: int

    @property
    def lanes(self) -> int:
        return self.cards // self.lane_cards


@dataclass(frozen=True)
class Layout:
    """A split of the cluster. `helper_lane_cards` is None where the trainer's cards cannot generate."""

    generators: tuple[GeneratorLayout, ...]
    trainer: TrainerLayout
    helper_lane_cards: int | None

    @cached_property
    def usd_per_hour(self) -> float:
        """What the cards in use cost; cards left out are not paid for."""
        generating = sum(g.cards * g.pool.usd_per_card_hour for g in self.generators)
        return generating + self.trainer.cards * self.trainer.pool.usd_per_card_hour

    @property
    def cards(self) -> int:
        return self.trainer.cards + sum(generator.cards for generator in self.generators)

    @property
    def helper_lanes(self) -> int:
        return self.trainer.cards // self.helper_lane_cards if self.helper_lane_cards else 0

    @property
    def split(self) -> str:
        """The split in words, which is also its identity: '8 H100 train; 16 RTX A6000 generate'."""
        generating = " + ".join(f"{g.cards} {g.pool.name}" for g in self.generators)
        return f"{self.trainer.cards} {self.trainer.pool.name} train; {generating} generate"


def generator_layout(
    workload: Workload, pool: CardPool, cards: int, constants: Constants = CONSTANTS
) -> GeneratorLayout | None:
    """The lanes that `cards` cards of the pool make, or None where not even one fits."""
    lane_cards = smallest_lane(workload, pool.card, pool.per_node, constants.memory_headroom)
    if lane_cards is None or cards < lane_cards:
        return None
    return GeneratorLayout(pool, cards - cards % lane_cards, lane_cards)


def best_trainer(
    workload: Workload,
    pool: CardPool,
    cards: int,
    samples_per_unit: int,
    constants: Constants = CONSTANTS,
    packed: bool = True,
    node_shards: bool = True,
) -> TrainerLayout | None:
    """The simplest sharding, pack and checkpointing within 1 % of the soonest that fit; None where none fits.

    They bear on nothing but the trainer's own time, so they are chosen here, outside the search over splits.
    Without `packed` (no time-step parallelism) every pair is a pass of its own and a sample stays on one rank;
    without `node_shards` no copy is kept per node.
    """
    units = ceil(workload.samples_per_step / samples_per_unit)
    seconds = {
        trainer: units * unit_seconds(workload, trainer, samples_per_unit, constants)
        + commit_seconds(workload, trainer, constants)
        for trainer in _fitting_trainers(workload, pool, cards, samples_per_unit, constants, packed)
        if node_shards or trainer.shard_cards in (1, cards)
    }
    if not seconds:
        return None
    fast_enough = min(seconds.values()) * (1 + SIMPLER_MAY_COST)
    return min(
        (trainer for trainer in seconds if seconds[trainer] <= fast_enough),
        key=lambda trainer: (trainer.shard_cards, trainer.pack, trainer.checkpointing),
    )


def _fitting_trainers(
    workload: Workload,
    pool: CardPool,
    cards: int,
    samples_per_unit: int,
    constants: Constants,
    packed: bool,
) -> Iterator[TrainerLayout]:
    packs = _pack_sizes(workload, cards, samples_per_unit) if packed else (1,)
    for shard_cards, checkpointing, pack in product(_shard_sizes(pool, cards), (False, True), packs):
        trainer = TrainerLayout(pool, cards, shard_cards, pack, checkpointing, spread_steps=packed)
        if memory_of_trainer(workload, trainer, constants.memory_headroom).fits:
            yield trainer


def memory_of_trainer(workload: Workload, trainer: TrainerLayout, headroom: float) -> MemoryReport:
    return trainer_memory(
        workload, trainer.pool.card, trainer.shard_cards, trainer.pack, trainer.checkpointing, headroom
    )


def fitting_slices(workload: Workload, layout: Layout, constants: Constants = CONSTANTS) -> tuple[int, ...]:
    """Slice sizes that every generator lane can hold; size 1 always can."""
    return tuple(
        size
        for size in workload.slice_sizes()
        if all(
            generator_memory(workload, g.pool.card, size, g.lane_cards, constants.memory_headroom).fits
            for g in layout.generators
        )
    )


def _shard_sizes(pool: CardPool, cards: int) -> tuple[int, ...]:
    """A whole copy on each card; one per node, where nodes are filled; one over all cards."""
    sizes = {1, cards}
    if cards % pool.per_node == 0:
        sizes.add(pool.per_node)
    return tuple(sorted(sizes))


def _pack_sizes(workload: Workload, cards: int, samples_per_unit: int) -> tuple[int, ...]:
    """Powers of two up to all the pairs that one rank gets of a unit, and exactly those."""
    most = ceil(samples_per_unit * workload.pairs_per_sample / cards)
    powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent < most]
    return (*powers, most)
