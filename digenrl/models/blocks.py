"""A transformer's repeated blocks: most of its weights and work, and what is compiled or computed again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch.utils.checkpoint
from torch import nn

from digenrl.models.contract import DiffusionModel


def repeated_blocks(transformer: nn.Module) -> list[nn.Module]:
    """All of them, in the order in which a forward meets them; alike but for their kind."""
    lists = [child for child in transformer.children() if isinstance(child, nn.ModuleList)]
    return [block for each in lists for block in each]


def kind_of(block: nn.Module) -> tuple[str, int]:
    """Blocks of one kind do the same work: they are of one class and have equally many weights."""
    return type(block).__name__, sum(weight.numel() for weight in block.parameters())


def checkpoint_blocks(model: DiffusionModel, count: int) -> None:
    """The first `count` blocks keep no activations: the backward computes them again; the gradient is the same.

    The first, because theirs are kept longest: when the backward comes to them, the others' are already freed, and
    the block that is computed again needs no room of its own.
    """
    blocks = repeated_blocks(model.transformer)
    assert 0 <= count <= len(blocks), f"{count} of {len(blocks)} blocks"
    checkpoint_chosen(model, blocks[:count])


def checkpoint_chosen(model: DiffusionModel, blocks: Collection[nn.Module]) -> None:
    """Just these blocks are computed again in the backward."""
    transformer: Any = model.transformer
    if not blocks:
        switch = getattr(transformer, "disable_gradient_checkpointing", None)
        if switch is not None:
            switch()
        return
    if not hasattr(transformer, "enable_gradient_checkpointing"):
        raise ValueError(f"{model.family} cannot checkpoint its gradient; set gradient_checkpointing: false")
    chosen = set(blocks)

    def call(block: Callable[..., Any], *arguments: Any) -> Any:
        if block not in chosen:
            return block(*arguments)
        return torch.utils.checkpoint.checkpoint(block, *arguments, use_reentrant=False)

    transformer.enable_gradient_checkpointing(call)
