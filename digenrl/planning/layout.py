"""Who does what: the cards that generate, in lanes, and the cards that train, as one group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil
from typing import Literal

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
class Abilities:
    """What the system that is to run a plan can do; by default all that the cost model knows.

    `shards`: weights over all of the trainer's cards, a node's, or whole (`any`), all or whole (`no_nodes`), or
    `as_trained`: adapters beside a whole copy, fully trained weights over all cards. With `sharded_help` a trainer
    that holds shards can generate. Without `packed` (no time-step parallelism) every pair is a pass of its own and
    a sample stays on one rank.
    """

    tensor_parallel: bool = True
    shards: Literal["any", "no_nodes", "as_trained"] = "any"
    sharded_help: bool = True
    packed: bool = True
    largest_pack: int | None = None
    checkpointing: tuple[bool, ...] = (False, True)


EVERYTHING = Abilities()


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
    workload: Workload,
    pool: CardPool,
    cards: int,
    constants: Constants = CONSTANTS,
    abilities: Abilities = EVERYTHING,
) -> GeneratorLayout | None:
    """The lanes that `cards` cards of the pool make, or None where none fits; a measured lane is a card."""
    lane_cards: int | None = None
    if pool.measured.slice_seconds is not None:
        lane_cards = 1 if any(pool.measured.covers(size) for size in workload.slice_sizes()) else None
    elif workload.catalogued:
        widest = pool.per_node if abilities.tensor_parallel else 1
        lane_cards = smallest_lane(workload, pool.card, widest, constants.memory_headroom)
    if lane_cards is None or cards < lane_cards:
        return None
    return GeneratorLayout(pool, cards - cards % lane_cards, lane_cards)


def helper_lane_cards(
    workload: Workload, trainer: TrainerLayout, constants: Constants, abilities: Abilities
) -> int | None:
    """Cards of a lane that the trainer's cards make when they generate, or None where they cannot."""
    if trainer.shard_cards > 1 and not abilities.sharded_help:
        return None
    layout = generator_layout(workload, trainer.pool, trainer.cards, constants, abilities)
    return None if layout is None else layout.lane_cards


def can_help(layout: Layout, slice_size: int) -> bool:
    """Whether the trainer's cards can make slices of this size."""
    measured = layout.trainer.pool.measured
    return layout.helper_lanes > 0 and (measured.slice_seconds is None or measured.covers(slice_size))


def best_trainer(
    workload: Workload,
    pool: CardPool,
    cards: int,
    samples_per_unit: int,
    constants: Constants = CONSTANTS,
    abilities: Abilities = EVERYTHING,
) -> TrainerLayout | None:
    """The simplest sharding, pack and checkpointing within 1 % of the soonest that fit; None where none fits.

    They bear on nothing but the trainer's own time, so they are chosen here, outside the search over splits. What
    was measured fits, and its pack and checkpointing are those of the measurement.
    """
    if pool.measured.train_seconds_per_sample is not None:
        shards = cards if workload.tuning == "full" else 1
        return TrainerLayout(pool, cards, shards, 1, False, spread_steps=abilities.packed)
    if not workload.catalogued:
        return None
    units = ceil(workload.samples_per_step / samples_per_unit)
    seconds = {
        trainer: units * unit_seconds(workload, trainer, samples_per_unit, constants)
        + commit_seconds(workload, trainer, constants)
        for trainer in _fitting_trainers(workload, pool, cards, samples_per_unit, constants, abilities)
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
    abilities: Abilities,
) -> Iterator[TrainerLayout]:
    packs: tuple[int, ...] = (1,)
    if abilities.packed:
        packs = _pack_sizes(workload, cards, samples_per_unit, abilities.largest_pack)
    shard_sizes = _shard_sizes(workload, pool, cards, abilities)
    for shard_cards, checkpointing, pack in product(shard_sizes, abilities.checkpointing, packs):
        trainer = TrainerLayout(pool, cards, shard_cards, pack, checkpointing, spread_steps=abilities.packed)
        if memory_of_trainer(workload, trainer, constants.memory_headroom).fits:
            yield trainer


def memory_of_trainer(workload: Workload, trainer: TrainerLayout, headroom: float) -> MemoryReport:
    return trainer_memory(
        workload, trainer.pool.card, trainer.shard_cards, trainer.pack, trainer.checkpointing, headroom
    )


def fitting_slices(workload: Workload, layout: Layout, constants: Constants = CONSTANTS) -> tuple[int, ...]:
    """Slice sizes that every generator lane can make; where nothing was measured, size 1 is one of them."""
    by_lane = [lane_sizes(workload, generator, constants) for generator in layout.generators]
    return tuple(size for size in workload.slice_sizes() if all(size in sizes for sizes in by_lane))


def lane_sizes(
    workload: Workload, generator: GeneratorLayout, constants: Constants = CONSTANTS
) -> tuple[int, ...]:
    """Slice sizes that a lane of the pool can make: those that fit its memory, or that its measurements cover."""
    pool = generator.pool
    if pool.measured.slice_seconds is not None:
        return tuple(size for size in workload.slice_sizes() if pool.measured.covers(size))
    return tuple(
        size
        for size in workload.slice_sizes()
        if generator_memory(workload, pool.card, size, generator.lane_cards, constants.memory_headroom).fits
    )


def _shard_sizes(workload: Workload, pool: CardPool, cards: int, abilities: Abilities) -> tuple[int, ...]:
    """A whole copy on each card; one per node, where nodes are filled; one over all cards."""
    if abilities.shards == "as_trained":
        return (cards,) if workload.tuning == "full" else (1,)
    sizes = {1, cards}
    if cards % pool.per_node == 0 and abilities.shards == "any":
        sizes.add(pool.per_node)
    return tuple(sorted(sizes))


def _pack_sizes(workload: Workload, cards: int, samples_per_unit: int, largest: int | None) -> tuple[int, ...]:
    """Powers of two up to all the pairs that one rank gets of a unit, and exactly those; none above `largest`."""
    most = ceil(workload.trained_samples(samples_per_unit) * workload.pairs_per_sample / cards)
    most = min(most, largest or most)
    powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent < most]
    return (*powers, most)
