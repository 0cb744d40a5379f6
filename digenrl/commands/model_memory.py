"""The memory that a recipe's model needs on one device, and what this device has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from digenrl.commands.derived_facts import derive_facts, with_targets
from digenrl.config.recipe import Recipe
from digenrl.host_memory import free_host_bytes
from digenrl.planning.cards import undescribed_card
from digenrl.planning.cluster import Cluster
from digenrl.planning.memory import GIB, generator_memory, trainer_memory
from digenrl.planning.recipe_workload import catalogue_model, workload_of


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


def this_device(name: str) -> Device:
    """A device of this machine, as `cuda:0`; the CPU has the memory that is free now."""
    if name.startswith("cuda"):
        card = torch.cuda.get_device_properties(name)
        return Device(card.name, name, card.total_memory)
    return Device("this machine's memory", "cpu", free_host_bytes() or 0)


def memory_needs(recipe: Recipe, configurations: Path | None, text_encoder_bytes: int) -> MemoryNeeds:
    """The needs of a recipe's model. `configurations` is a folder with config.json of transformer and VAE."""
    entry = catalogue_model(recipe)
    facts = derive_facts(recipe, configurations) if entry is None else with_targets(entry, recipe)
    workload = workload_of(recipe, Cluster.model_construct(pools=()), facts)
    card, shards = undescribed_card("this device"), recipe.lanes.ranks if recipe.shards_model else 1
    generator = generator_memory(workload, card, size=1)
    trainer = trainer_memory(workload, card, shards, pairs=1, checkpointing=True)
    return MemoryNeeds(
        encode=text_encoder_bytes,
        generate=round(generator.total_gib * GIB),
        train=round(trainer.total_gib * GIB),
    )


def weight_bytes(files: Mapping[str, int], names: tuple[str, ...]) -> int:
    """The size of the weight files of these components."""
    return sum(
        size for path, size in files.items() if path.endswith(".safetensors") and path.split("/")[-2] in names
    )
