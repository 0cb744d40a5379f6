"""Where a recipe cuts a model into stages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.base_precision import UNQUANTIZED, stored_bytes
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.parallel.block_costs import ChainCosts, chain_costs
from digenrl.models.parallel.staged_blocks import chain_length
from digenrl.stages.partition import best_partition
from digenrl.training.ranks.cards import CardFacts, relative_speeds
from digenrl.training.ranks.rank_group import RankGroup

logger = logging.getLogger(__name__)

KEY = "training.stages"
CARDS_FILE = "trainer_cards.json"  # in the run's folder: the measured rates of the ranks' cards
GIB = 2**30
# In full fine-tuning: fp32 weights and gradients, two moments, and the gradient of the groups before.
TRAINED_BYTES = 20


def check_bounds(recipe: Recipe, blocks: int) -> None:
    """Raises ConfigError if a chain of this many blocks cannot be cut as the recipe says."""
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


def stage_bounds(
    recipe: Recipe, transformer: nn.Module, blocks_before_chain: tuple[str, ...], ranks: RankGroup
) -> tuple[int, ...]:
    """The bounds of the stages in a transformer's chain of blocks; raises ConfigError if it cannot be cut there.

    With `auto`, the cards of the ranks are measured: `ranks.cards` must have been called if that cannot be a
    collective here.
    """
    check_bounds(recipe, chain_length(transformer, blocks_before_chain))
    stages = recipe.training.stages
    if isinstance(stages, tuple):
        return tuple(accumulate(stages, initial=0))
    cards = ranks.cards()
    bounds = cut_for_cards(chain_costs(transformer, blocks_before_chain), cards, bytes_per_parameter(recipe))
    if ranks.rank.is_first:
        shown = ", ".join(
            f"{end - first} on {card.name}" for (first, end), card in zip(pairwise(bounds), cards, strict=True)
        )
        logger.info("%s: auto cuts the blocks into %s", KEY, shown)
    return bounds


def cut_for_cards(costs: ChainCosts, cards: Sequence[CardFacts], weight_bytes: float) -> tuple[int, ...]:
    """The bounds with which a step is shortest and all weights fit on their cards.

    As many packs as are in flight at once are assumed. Raises ConfigError if the weights do not fit.
    """

    def fits(stage: int, first: int, end: int) -> bool:
        free = cards[stage].free_bytes
        return free is None or weight_bytes * (costs.others + sum(costs.parameters[first:end])) <= free

    speeds, links = relative_speeds(cards), len(cards) - 1
    try:
        cut = best_partition(costs.work, speeds, 0.0, [1.0] * links, 2 * len(cards), fits)
    except ValueError:
        need = weight_bytes * (costs.others * len(cards) + sum(costs.parameters)) / GIB
        free = " + ".join(
            "no limit" if card.free_bytes is None else f"{card.free_bytes / GIB:.1f}" for card in cards
        )
        raise ConfigError(
            f"{KEY}: auto finds no cut of {len(costs.work)} blocks that fits on {len(cards)} cards: weights and "
            f"what trains them take {need:.1f} GiB, and {free} GiB are free; use more or larger cards",
            KEY,
        ) from None
    return cut.bounds


def bytes_per_parameter(recipe: Recipe) -> float:
    """What a parameter of a stage takes on its card, without activations."""
    if recipe.training.lora is None:
        return TRAINED_BYTES
    if recipe.model.base != UNQUANTIZED:
        return stored_bytes(recipe.model.base, 1, trains=True)
    return 4 if recipe.model.dtype == "float32" else 2
