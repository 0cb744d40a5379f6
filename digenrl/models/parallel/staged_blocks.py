"""A model cut into stages: each process computes some of the blocks, with the family's unmodified forward.

The forward runs on every stage. Blocks of other stages return the states that they are given, except for the one
before this stage's first block: it returns what the stage before has computed. Everything around the blocks, such
as embeddings of time and text, is cheap and computed on every stage. So only the states of blocks travel, and only
the velocity of the last stage is meaningful.
"""

from __future__ import annotations

from diffusers import UNet2DConditionModel
from torch import nn

from digenrl.config.reading import ConfigError
from digenrl.models.blocks import BlockElsewhere, block_places
from digenrl.models.contract import DiffusionModel
from digenrl.models.parallel.own_blocks import OwnBlocks

Place = tuple[str, nn.ModuleList, int]


def keep_blocks(model: DiffusionModel, first: int, end: int) -> None:
    """Makes a model compute the blocks `first` to `end` - 1 of its chain; it loses all others.

    Names of weights stay the same, and the adapters of all blocks stay. `model.own_blocks` runs forwards.
    """
    check_chain(model)
    places = block_places(model.transformer)
    chain = [each for each in places if each[0] not in model.blocks_before_chain]
    if not 0 <= first < end <= len(chain):
        raise ValueError(f"no blocks {first} to {end - 1}: {model.family} has a chain of {len(chain)}")
    own = OwnBlocks(first, end, len(chain))
    _, blocks, index = chain[end - 1]
    if not own.is_last:
        blocks[index].register_forward_hook(own.send_states)
    if first > 0:
        _replace(model, [each for each in places if each[0] in model.blocks_before_chain])
    stand_ins = _replace(model, [*chain[:first], *chain[end:]])
    if first > 0:
        stand_ins[first - 1].replace = own.receive_states
    model.own_blocks = own


def outside_blocks(model: DiffusionModel) -> frozenset[str]:
    """The names of the parameters that all stages have: those of no block."""
    lists = tuple({f"{name}." for name, _, _ in block_places(model.transformer)})
    return frozenset(name for name, _ in model.transformer.named_parameters() if not name.startswith(lists))


def check_chain(model: DiffusionModel) -> None:
    """Raises ConfigError if a model's blocks are not a chain, or if its forwards are divided already."""
    check_is_chain(model.transformer, model.family)
    if model.exchange is not None or model.own_blocks is not None:
        raise ConfigError("training.stages: the forwards of this model are divided over several cards already")


def check_is_chain(transformer: nn.Module, family: str) -> None:
    """Raises ConfigError if the blocks of a family's transformer are not a chain."""
    if isinstance(transformer, UNet2DConditionModel):
        raise ConfigError(
            f"training.stages: {family} cannot be trained in stages, because the blocks of a UNet do not form a "
            "chain; leave it out, or use a family with a transformer"
        )


def chain_length(transformer: nn.Module, blocks_before_chain: tuple[str, ...]) -> int:
    """The number of blocks that can be divided over stages."""
    return sum(name not in blocks_before_chain for name, _, _ in block_places(transformer))


def _replace(model: DiffusionModel, places: list[Place]) -> list[BlockElsewhere]:
    stand_ins = []
    for _, blocks, index in places:
        blocks[index] = stand_in = BlockElsewhere(blocks[index], model.block_state_arguments)
        stand_ins.append(stand_in)
    return stand_ins
