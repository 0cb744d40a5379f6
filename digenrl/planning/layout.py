"""How cards are assigned: generator cards in lanes, trainer cards as one group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil
from typing import Literal

from digenrl.config.recipes.base_precision import UNQUANTIZED
from digenrl.planning.costs import TrainerLayout, commit_seconds, unit_seconds
from digenrl.planning.facts.cluster import CardPool
from digenrl.planning.facts.workload import Workload
from digenrl.planning.memory import (
    MemoryReport,
    generator_memory,
    shared_card_memory,
    smallest_lane,
    trainer_memory,
)
from digenrl.planning.sites.groups import SiteLink

# Fewer shards and smaller packs free memory and make helping cheaper, which is worth this share of training time.
SIMPLER_MAY_COST = 0.01


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of the runtime that will run a plan; by default everything that the cost model supports.

    `shards` is how weights may be sharded: over all trainer cards, per node or not at all (`any`), over all cards
    or not at all (`no_nodes`), or `as_trained`: over all cards for full fine-tuning and, for adapters, if a copy
    does not fit on a card. With `sharded_help` a trainer with sharded weights can generate. Without `packed` (no
    time-step parallelism) every pair is one pass, and one rank trains all pairs of a sample. `replica_cards` train
    each sample together.
    """

    tensor_parallel: bool = True
    shards: Literal["any", "no_nodes", "as_trained"] = "any"
    sharded_help: bool = True
    packed: bool = True
    largest_pack: int | None = None
    checkpointing: tuple[bool, ...] = (False, True)
    replica_cards: int = 1


ALL_CAPABILITIES = Capabilities()


@dataclass(frozen=True, slots=True)
class GeneratorLayout:
    """Generator cards of one pool: one lane per card, or per tensor-parallel set if a card is too small."""

    pool: CardPool
    cards: int
    lane_cards: int

    @property
    def lanes(self) -> int:
        return self.cards // self.lane_cards


@dataclass(frozen=True)
class Layout:
    """The use of the cards. `helper_lane_cards` is None if the trainer's cards cannot generate.

    `alone` says how a card of each generator pool trains on its own, None if it cannot; it is empty if generators
    only generate. Without generators, the trainer's cards generate before they train (colocated). `site_links` are
    those of the cluster.
    """

    generators: tuple[GeneratorLayout, ...]
    trainer: TrainerLayout
    helper_lane_cards: int | None
    alone: tuple[TrainerLayout | None, ...] = ()
    site_links: tuple[SiteLink, ...] = ()

    @cached_property
    def usd_per_hour(self) -> float:
        """The price of all cards in use."""
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
        """The split in words, which also identifies it: '8 H100 train; 16 RTX A6000 generate'."""
        if not self.generators:
            return f"{self.trainer.pool.name} generate, then train"
        if self.alone:
            return self._shared_words()
        generating = " + ".join(f"{g.cards} {g.pool.name}" for g in self.generators)
        return f"{self.trainer.cards} {self.trainer.pool.name} train; {generating} generate"

    def _shared_words(self) -> str:
        """'8 H100 generate and train; 16 RTX A6000 generate'."""
        both: dict[str, int] = {self.trainer.pool.name: self.trainer.cards}
        others: list[str] = []
        for generator, trains in zip(self.generators, self.alone, strict=True):
            name = generator.pool.name
            if trains is None:
                others.append(f"{generator.cards} {name}")
            else:
                both[name] = both.get(name, 0) + generator.cards
        words = " + ".join(f"{cards} {name}" for name, cards in both.items()) + " generate and train"
        return f"{words}; {' + '.join(others)} generate" if others else words


def generator_layout(
    workload: Workload, pool: CardPool, cards: int, capabilities: Capabilities = ALL_CAPABILITIES
) -> GeneratorLayout | None:
    """The lanes of `cards` cards of the pool, or None if the model does not fit; a measured lane is one card."""
    lane_cards: int | None = None
    if pool.measured.slice_seconds is not None:
        lane_cards = 1 if any(pool.measured.covers(size) for size in workload.slice_sizes()) else None
    elif workload.has_cost_model:
        widest = pool.per_node if capabilities.tensor_parallel else 1
        lane_cards = smallest_lane(workload, pool.card, widest)
    if lane_cards is None or cards < lane_cards:
        return None
    return GeneratorLayout(pool, cards - cards % lane_cards, lane_cards)


def helper_lane_cards(workload: Workload, trainer: TrainerLayout, capabilities: Capabilities) -> int | None:
    """Cards per lane if the trainer's cards generate, or None if they cannot."""
    if trainer.replica_cards > 1 or (trainer.shard_cards > 1 and not capabilities.sharded_help):
        return None
    layout = generator_layout(workload, trainer.pool, trainer.cards, capabilities)
    return None if layout is None else layout.lane_cards


def can_help(layout: Layout, slice_size: int) -> bool:
    """Whether the trainer's cards can generate slices of this size."""
    measured = layout.trainer.pool.measured
    return layout.helper_lanes > 0 and (measured.slice_seconds is None or measured.covers(slice_size))


def best_trainer(
    workload: Workload,
    pool: CardPool,
    cards: int,
    samples_per_unit: int,
    capabilities: Capabilities = ALL_CAPABILITIES,
    beside_generation: bool = False,
) -> TrainerLayout | None:
    """The simplest sharding, pack and checkpointing within 1 % of the fastest that fit; None if none fits.

    They affect only the training time, so they are chosen here, outside the search over splits. A measured trainer
    fits, with the pack and checkpointing of its measurement. With `beside_generation`, a card (of one) also has to
    hold what it generates with.
    """
    if cards % capabilities.replica_cards:
        return None
    if pool.measured.train_seconds_per_sample is not None:
        shards = cards if workload.tuning == "full" else 1
        return TrainerLayout(pool, cards, shards, 1, False, capabilities.packed, capabilities.replica_cards)
    if not workload.has_cost_model:
        return None
    units = ceil(workload.samples_per_step / samples_per_unit)
    seconds = {
        trainer: units * unit_seconds(workload, trainer, samples_per_unit) + commit_seconds(workload, trainer)
        for trainer in _trainers(workload, pool, cards, samples_per_unit, capabilities)
        if _fits(workload, trainer, beside_generation)
    }
    if not seconds:
        return None
    if capabilities.shards == "as_trained":  # ranks that hold a copy can also generate
        fewest = min(trainer.shard_cards for trainer in seconds)
        seconds = {trainer: each for trainer, each in seconds.items() if trainer.shard_cards == fewest}
    fast_enough = min(seconds.values()) * (1 + SIMPLER_MAY_COST)
    return min(
        (trainer for trainer in seconds if seconds[trainer] <= fast_enough),
        key=lambda trainer: (trainer.shard_cards, trainer.pack, trainer.checkpointing),
    )


def _trainers(
    workload: Workload, pool: CardPool, cards: int, samples_per_unit: int, capabilities: Capabilities
) -> Iterator[TrainerLayout]:
    together = capabilities.replica_cards
    packs: tuple[int, ...] = (1,)
    if capabilities.packed:
        packs = _pack_sizes(workload, cards // together, samples_per_unit, capabilities.largest_pack)
    shard_sizes = possible_shards(workload, pool, cards, capabilities)
    for shard_cards, checkpointing, pack in product(shard_sizes, capabilities.checkpointing, packs):
        yield TrainerLayout(pool, cards, shard_cards, pack, checkpointing, capabilities.packed, together)


def _fits(workload: Workload, trainer: TrainerLayout, beside_generation: bool) -> bool:
    if not beside_generation:
        return memory_of_trainer(workload, trainer).fits
    return memory_of_shared_card(workload, trainer, 1).fits


def memory_of_trainer(workload: Workload, trainer: TrainerLayout) -> MemoryReport:
    report = trainer_memory(workload, trainer.pool.card, trainer.shard_cards, trainer.pack, trainer.checkpointing)
    return replace(report, activations_gib=report.activations_gib / trainer.replica_cards)


def memory_of_shared_card(workload: Workload, trainer: TrainerLayout, size: int) -> MemoryReport:
    """A card that trains alone like this, and generates slices of `size`."""
    return shared_card_memory(workload, trainer.pool.card, size, trainer.pack, trainer.checkpointing)


def fitting_slices(workload: Workload, layout: Layout) -> tuple[int, ...]:
    """Slice sizes that every generator lane supports; without measurements, size 1 is always one of them."""
    by_lane = [lane_sizes(workload, generator) for generator in layout.generators]
    return tuple(size for size in workload.slice_sizes() if all(size in sizes for sizes in by_lane))


def lane_sizes(workload: Workload, generator: GeneratorLayout) -> tuple[int, ...]:
    """Slice sizes that fit the memory of the pool's lanes, or that its measurements cover."""
    pool = generator.pool
    if pool.measured.slice_seconds is not None:
        return tuple(size for size in workload.slice_sizes() if pool.measured.covers(size))
    return tuple(
        size
        for size in workload.slice_sizes()
        if generator_memory(workload, pool.card, size, generator.lane_cards).fits
    )


def possible_shards(workload: Workload, pool: CardPool, cards: int, capabilities: Capabilities) -> tuple[int, ...]:
    """A copy of the weights per card, per full node, or over all cards."""
    if capabilities.shards == "as_trained" and workload.tuning == "full":
        return (cards,)
    if workload.base != UNQUANTIZED:  # quantized weights cannot be sharded
        return (1,)
    sizes = {1, cards}
    if cards % pool.per_node == 0 and capabilities.shards == "any":
        sizes.add(pool.per_node)
    return tuple(sorted(sizes))


def _pack_sizes(workload: Workload, ranks: int, samples_per_unit: int, largest: int | None) -> tuple[int, ...]:
    """Powers of two below the pairs that one rank gets of a part of a unit, and that number; at most `largest`."""
    pairs = workload.trained_samples(samples_per_unit) * workload.pairs_per_sample
    most = ceil(pairs / workload.parts_per_group / ranks)
    most = min(most, largest or most)
    powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent < most]
    return (*powers, most)
