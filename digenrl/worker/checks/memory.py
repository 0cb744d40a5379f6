"""Whether a model fits into the memory of a machine without a GPU, where too large a process is killed."""

from __future__ import annotations

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.base_precision import STORED_BYTES
from digenrl.worker.blueprint import Blueprint, dtype_of, transformer_without_weights

GB = 1e9


def check_host_memory(blueprint: Blueprint, total_bytes: int) -> None:
    """Raises ConfigError if the transformer's weights alone take more than all memory of the machine.

    Reads no weights. A hub id that is not in the cache is not checked.
    """
    recipe = blueprint.recipe
    try:
        transformer = transformer_without_weights(blueprint)
    except OSError:
        return
    # Random weights are not mapped from a file: a generator in a process of its own has others than the trainer.
    separate = recipe.model.random and not recipe.topology.one_process
    bases = (recipe.model.base, recipe.generating_base) if separate else (recipe.model.base,)
    elements = sum(parameter.numel() for parameter in transformer.parameters())
    needed = sum(elements * STORED_BYTES.get(base, dtype_of(recipe).itemsize) for base in bases)
    if needed > total_bytes:
        size = f"{needed / GB:.1f} GB" + (", for the generator and for the trainer" if separate else "")
        raise ConfigError(
            f"model.source: {recipe.model.source}, but the weights of {blueprint.family.name} take {size}, and "
            f"this machine has {total_bytes / GB:.1f} GB of memory and no GPU; use one with more, or a smaller "
            "model; 'digenrl check RECIPE' lists what a model needs",
            "model.source",
        )
