"""The memory that a recipe's model needs on one device, and what this device has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from digenrl.commands.support.derived_facts import derive_facts, with_targets
from digenrl.config.recipes.base_precision import STORED_BYTES, UNQUANTIZED
from digenrl.config.recipes.recipe import Recipe
from digenrl.host_memory import free_host_bytes
from digenrl.planning.facts.cards import undescribed_card
from digenrl.planning.facts.cluster import Cluster
from digenrl.planning.facts.model_facts import BYTES_BF16
from digenrl.planning.facts.recipe_workload import catalog_model, workload_of
from digenrl.planning.memory import GIB, generator_memory, trainer_memory

EMBEDDINGS = 0.2  # of a text encoder's weights, at most


@dataclass(frozen=True, slots=True)
class Device:
    """A device and its memory."""

    name: str
    torch_name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Peak bytes of one device, by what it does: one sample at a time, one trained pair, checkpointing."""

    encode: int
    generate: int
    train: int

    @property
    def largest(self) -> int:
        return max(self.encode, self.generate, self.train)


def this_device(name: str, limit_gib: float | None = None) -> Device:
    """A device of this machine, as `cuda:0`; the CPU has the memory that is free now.

    A card has at most the memory that `lanes.memory_gib` allows.
    """
    if name.startswith("cuda"):
        card = torch.cuda.get_device_properties(name)
        limit = card.total_memory if limit_gib is None else min(card.total_memory, int(limit_gib * GIB))
        return Device(card.name, name, limit)
    return Device("this machine's memory", "cpu", free_host_bytes() or 0)


def memory_needs(recipe: Recipe, configurations: Path | None, text_encoder_bytes: int) -> MemoryNeeds:
    """The needs of a recipe's model. `configurations` is a folder with config.json of transformer and VAE."""
    entry = catalog_model(recipe)
    facts = derive_facts(recipe, configurations) if entry is None else with_targets(entry, recipe)
    workload = workload_of(recipe, Cluster.model_construct(pools=()), facts)
    card, shards = undescribed_card("this device"), recipe.lanes.ranks if recipe.shards_model else 1
    generator = generator_memory(workload, card, size=1)
    trainer = trainer_memory(workload, card, shards, pairs=1, checkpointing=True)
    trainer = replace(trainer, activations_gib=trainer.activations_gib / recipe.lanes.cards_per_replica)
    if recipe.topology.one_process and recipe.training.lora is not None:  # what trains stays on the card
        generator = replace(trainer, activations_gib=generator.activations_gib)
    return MemoryNeeds(
        encode=round(text_encoder_bytes * _encoder_share(recipe.model.encoder_base)),
        generate=round(generator.total_gib * GIB),
        train=round(trainer.total_gib * GIB),
    )


def _encoder_share(precision: str) -> float:
    """The share of a text encoder's 16 bit weights that is left after quantizing all but embeddings."""
    if precision == UNQUANTIZED:
        return 1.0
    return EMBEDDINGS + (1 - EMBEDDINGS) * STORED_BYTES[precision] / BYTES_BF16


def weight_bytes(files: Mapping[str, int], names: tuple[str, ...]) -> int:
    """The size of the weight files of these components."""
    return sum(
        size for path, size in files.items() if path.endswith(".safetensors") and path.split("/")[-2] in names
    )
