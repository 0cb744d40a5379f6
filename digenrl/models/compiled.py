"""Compiles a transformer's repeated blocks, one graph for all blocks of a kind and each shape of a batch.

Shapes are static, but for the length of texts that are not padded to a fixed one. A graph is compiled where a
shape is first met; a rehearsal meets all that a run will use, so that nothing is compiled while the run goes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from digenrl.models.blocks import repeated_blocks
from digenrl.models.contract import DiffusionModel

GRAPHS = 64  # of one kind of block: sizes of slices and packs, with and without gradient, adapters on and off


def compile_blocks(model: DiffusionModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """From now on blocks run compiled. Adapters have to be there already. Backends are torch.compile's."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    for block in repeated_blocks(model.transformer):
        names = tuple(inspect.signature(type(block).forward).parameters)[1:]
        block.register_forward_pre_hook(partial(_alike, model, names), with_kwargs=True)
        # The forward, not the module: calling a module is the same code for every kind of block, and graphs are
        # kept and counted by code.
        compiled = torch.compile(block.forward, fullgraph=True, dynamic=False, backend=backend)
        block.forward = compiled


def is_compiled(model: DiffusionModel) -> bool:
    """Whether `compile_blocks` was called on it."""
    return any("forward" in vars(block) for block in repeated_blocks(model.transformer))


def _alike(
    model: DiffusionModel,
    names: tuple[str, ...],
    block: nn.Module,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What differs between blocks or prompts and would need a graph of its own is made equal."""
    given = dict(zip(names, arguments, strict=False)) | named
    for name in model.passed_through_blocks:
        states: Tensor = given[name]
        if torch.is_grad_enabled() and not states.requires_grad:
            states.requires_grad_()  # with adapters, those that enter the first block do not
        given[name] = states.contiguous()  # some blocks leave a part of a longer sequence
    for value, dimension in model.dimensions_of_text(given):
        torch._dynamo.maybe_mark_dynamic(value, dimension)
    return tuple(given[name] for name in names[: len(arguments)]), {name: given[name] for name in named}
