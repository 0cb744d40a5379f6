"""A transformer's repeated blocks: the unit of compilation and of gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from digenrl.models.contract import DiffusionModel
from digenrl.models.experts import Experts, parts_of


def repeated_blocks(transformer: nn.Module) -> list[nn.Module]:
    """All blocks in the order of a forward; there may be several kinds.

    A UNet has them at several depths. The first of its middle is left out: diffusers never checkpoints it.
    """
    if isinstance(transformer, UNet2DConditionModel):
        kinds, left_out = (ResnetBlock2D, BasicTransformerBlock), transformer.mid_block.resnets[0]
        return [each for each in transformer.modules() if isinstance(each, kinds) and each is not left_out]
    lists = [
        child
        for part in parts_of(transformer).values()
        for child in part.children()
        if isinstance(child, nn.ModuleList)
    ]
    return [block for each in lists for block in each]


def block_positions(transformer: nn.Module) -> list[tuple[nn.Module, ...]]:
    """The blocks of every position in a forward: one, or one per transformer if each row passes one of several."""
    if isinstance(transformer, Experts):
        return list(zip(*(repeated_blocks(part) for part in parts_of(transformer).values()), strict=True))
    return [(block,) for block in repeated_blocks(transformer)]


def block_kind(block: nn.Module) -> tuple[str, int]:
    """Equal for blocks that do the same work: those of one class with the same number of weights."""
    return type(block).__name__, sum(weight.numel() for weight in block.parameters())


def checkpoint_blocks(model: DiffusionModel, count: int) -> None:
    """Checkpoints the first `count` positions: their blocks keep no activations, and the backward recomputes them.

    The activations of the first blocks are kept longest. When the backward reaches them, those of the others have
    been freed, and a recomputed block fits in that memory.
    """
    positions = block_positions(model.transformer)
    assert 0 <= count <= len(positions), f"{count} of {len(positions)} blocks"
    checkpoint_chosen(model, [block for position in positions[:count] for block in position])


def checkpoint_chosen(model: DiffusionModel, blocks: Collection[nn.Module]) -> None:
    """Checkpoints exactly these blocks."""
    transformer: Any = model.transformer
    if not blocks:
        switch = getattr(transformer, "disable_gradient_checkpointing", None)
        if switch is not None:
            switch()
        return
    if not hasattr(transformer, "enable_gradient_checkpointing"):
        raise ValueError(
            f"{model.family} does not support gradient checkpointing; set gradient_checkpointing: false"
        )
    chosen = set(blocks)

    def call(block: Callable[..., Any], *arguments: Any) -> Any:
        if block not in chosen:
            return block(*arguments)
        contexts = noop_context_fn if model.exchange is None else model.exchange.checkpoint_contexts
        return checkpoint(block, *arguments, use_reentrant=False, context_fn=contexts)

    transformer.enable_gradient_checkpointing(call)
