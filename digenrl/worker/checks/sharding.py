"""Whether a recipe's model can be sharded over the trainer's ranks, before anything is loaded."""

from __future__ import annotations

from contextlib import suppress

from torch import nn

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.blocks import repeated_blocks
from digenrl.models.parallel.staged_blocks import chain_length, check_is_chain
from digenrl.worker.blueprint import Blueprint, transformer_without_weights
from digenrl.worker.stage_bounds import check_bounds

KEY = "lanes.ranks"


def check_sharding(blueprint: Blueprint) -> None:
    """Raises ConfigError if the recipe's model cannot be sharded, or cut into its stages. Reads no weights.

    The layers of a hub id that is not in the cache are not checked.
    """
    recipe = blueprint.recipe
    if recipe.training.stages is not None:
        with suppress(OSError):
            transformer, family = transformer_without_weights(blueprint), blueprint.family
            check_is_chain(transformer, family.name)
            check_bounds(recipe, chain_length(transformer, family.model_class.blocks_before_chain))
    elif recipe.shards_model:
        _check_pairs(recipe)
        with suppress(OSError):
            check_blocks(transformer_without_weights(blueprint), blueprint.family.name, recipe.lanes.ranks)


def _check_pairs(recipe: Recipe) -> None:
    """Ranks of a sharded model run the same packs: those without pairs of their own would run padding."""
    algorithm = recipe.algorithm.settings()
    steps = algorithm.trained_steps(recipe.sample.denoising_steps, recipe.window)
    samples = algorithm.trained_samples(recipe.batch.samples_per_prompt) // recipe.updates_per_group
    pairs, ranks = max(1, samples * steps // algorithm.rows_per_term), recipe.lanes.ranks
    busy = pairs * recipe.lanes.cards_per_replica  # ranks at most
    if ranks > busy:
        alone = "set lanes.ranks to 1, or with adapters lanes.shard_base to false"
        use = f"use {busy} ranks or fewer" if busy > 1 else alone
        raise ConfigError(
            f"{KEY}: {ranks} ranks hold the model together, but a group has {pairs} (sample, step) pairs, "
            f"so {ranks - busy} of them would have nothing to do; {use}",
            KEY,
        )


def check_blocks(transformer: nn.Module, family: str, ranks: int) -> None:
    """Raises ConfigError if sharding would save no memory, or leave ranks without weights of a block."""
    blocks = repeated_blocks(transformer)
    if not blocks:
        raise ConfigError(
            f"{KEY}: {family} has no repeated blocks, so sharding it over {ranks} ranks saves nothing: a forward "
            "gathers all weights at once; set lanes.ranks to 1, or with adapters lanes.shard_base to false",
            KEY,
        )
    rows = min(max(len(weight) for weight in block.parameters()) for block in blocks)
    if ranks > rows:
        raise ConfigError(
            f"{KEY}: {ranks} ranks, but the weights of a block of {family} have at most {rows} rows; use {rows} "
            "ranks or fewer",
            KEY,
        )
