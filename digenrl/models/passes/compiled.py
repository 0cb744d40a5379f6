"""Compiles a transformer's repeated blocks: one graph per kind of block and batch shape.

Shapes are static, except for the length of texts that are not padded to a fixed one. A graph is compiled when its
shape first occurs. Calibration runs all shapes that a run uses, so nothing is compiled during the run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from digenrl.models.blocks import change_arguments, repeated_blocks
from digenrl.models.contract import DiffusionModel
from digenrl.models.passes.attention import AttentionProcessor
from digenrl.models.passes.fused_gelu import fuse_gelus
from digenrl.models.passes.own_outputs import own_outputs
from digenrl.models.passes.row_kernels import keep_rows_in_registers
from digenrl.models.quantized.feed_forward import fuse_feed_forwards
from digenrl.models.quantized.layers import QuantizedLinear

GRAPHS = 64  # per kind of block: sizes of slices and packs, with and without gradient, adapters on and off


def compile_blocks(model: DiffusionModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compiles all blocks, lazily; add adapters before. `backend` is that of torch.compile."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    real = backend == "inductor"
    if real:
        keep_rows_in_registers()
    for block in repeated_blocks(model.transformer):
        for layer in block.modules():
            if isinstance(layer, QuantizedLinear):
                layer.fused = real
            processor = getattr(layer, "processor", None)
            if isinstance(processor, AttentionProcessor):
                processor.fused = real
        if real:
            fuse_gelus(block)
            fuse_feed_forwards(block)
            own_outputs(block)
        change_arguments(block, partial(_normalized, model))
        # The forward, not the module: calling a module runs the same code for every kind of block, and graphs are
        # cached and counted per code object.
        compiled = torch.compile(block.forward, fullgraph=True, dynamic=False, backend=backend)
        block.forward = compiled


def is_compiled(model: DiffusionModel) -> bool:
    return any("forward" in vars(block) for block in repeated_blocks(model.transformer))


def _normalized(model: DiffusionModel, given: dict[str, Any]) -> dict[str, Any]:
    """A block's arguments without differences between blocks and prompts that would each cause another graph."""
    for name in model.block_state_arguments:
        states: Tensor | None = given.get(name)
        if states is None:  # some kinds of blocks take one stream only
            continue
        if torch.is_grad_enabled() and not states.requires_grad:
            states.requires_grad_()  # with adapters, the inputs of the first block do not
        given[name] = states.contiguous()  # some blocks return a slice of a longer sequence
    for value, dimension in model.text_length_dims(given):
        torch._dynamo.maybe_mark_dynamic(value, dimension)
    return given
