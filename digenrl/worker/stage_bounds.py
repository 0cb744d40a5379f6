"""Where a recipe cuts a model into stages."""

from __future__ import annotations

from itertools import accumulate

from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.stages.cut import even_bounds

KEY = "training.stages"


def stage_bounds(recipe: Recipe, blocks: int) -> tuple[int, ...]:
    """The bounds of the stages in a chain of blocks; raises ConfigError if it cannot be cut there."""
    stages, ranks = recipe.training.stages, recipe.lanes.ranks
    assert stages is not None, "the model is not in stages"
    if stages != "auto" and sum(stages) != blocks:
        raise ConfigError(
            f"{KEY}: {list(stages)} are {sum(stages)} blocks, and the model has {blocks}; change it, or set auto",
            KEY,
        )
    if ranks > blocks:
        raise ConfigError(
            f"{KEY}: {ranks} stages (lanes.ranks), but the model has {blocks} blocks; use fewer", KEY
        )
    return even_bounds(blocks, ranks) if stages == "auto" else tuple(accumulate(stages, initial=0))
