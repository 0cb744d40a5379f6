"""Compiled blocks that return tensors of their own, where diffusers returns slices of a longer sequence.

Slices would be copied before the next block, and their gradients padded and added, all outside compiled graphs.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from diffusers.models.transformers.transformer_hunyuan_video import (
    HunyuanVideoSingleTransformerBlock,
    HunyuanVideoTokenReplaceSingleTransformerBlock,
)
from torch import Tensor, nn

RETURN_SLICES = (
    FluxSingleTransformerBlock,
    HunyuanVideoSingleTransformerBlock,
    HunyuanVideoTokenReplaceSingleTransformerBlock,
)


def own_outputs(block: nn.Module) -> None:
    """Makes a block that will be compiled return text and image, or video, as separate contiguous tensors."""
    if isinstance(block, RETURN_SLICES):
        block.__class__ = _with_own_outputs(type(block))  # type: ignore[arg-type]


@cache  # one class per kind of block, as blocks of one class share compiled graphs
def _with_own_outputs(kind: Any) -> Any:
    class OwnOutputs(kind):  # type: ignore[misc]
        @wraps(kind.forward)
        def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
            states = super().forward(*arguments, **named)
            return tuple(each.clone(memory_format=torch.contiguous_format) for each in states)

    return OwnOutputs
