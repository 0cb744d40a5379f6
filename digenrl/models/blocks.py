"""A transformer's repeated blocks: the unit of compilation and of gradient checkpointing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from digenrl.models.contract import DiffusionModel
from digenrl.models.experts import Experts, parts_of


def repeated_blocks(transformer: nn.Module) -> list[nn.Module]:
    """All blocks in the order of a forward; there may be several kinds.

    A UNet has them at several depths. The first of its middle is left out: diffusers never checkpoints it. Blocks
    that another process computes are left out, too.
    """
    if isinstance(transformer, UNet2DConditionModel):
        kinds, left_out = (ResnetBlock2D, BasicTransformerBlock), transformer.mid_block.resnets[0]
        return [each for each in transformer.modules() if isinstance(each, kinds) and each is not left_out]
    parts = parts_of(transformer).values()
    blocks = [each[index] for part in parts for _, each, index in block_places(part)]
    return [block for block in blocks if not isinstance(block, BlockElsewhere)]


def block_places(transformer: nn.Module) -> list[tuple[str, nn.ModuleList, int]]:
    """Where the blocks are, and their stand-ins: the name of a list of them, the list, and an index in it."""
    lists = [(name, child) for name, child in transformer.named_children() if isinstance(child, nn.ModuleList)]
    return [(name, each, index) for name, each in lists for index in range(len(each))]


class BlockElsewhere(nn.Module):
    """Stands in for a block that another process computes: returns the states it is given, as the block would.

    `state_arguments` are the arguments that the block updates, in the order in which it returns them. Nothing is
    differentiated through it. `replace`, if set, changes what it returns. It keeps the block's adapters, under
    their names: all processes have all of them.
    """

    def __init__(self, block: nn.Module, state_arguments: tuple[str, ...]) -> None:
        super().__init__()
        self._names = tuple(inspect.signature(type(block).forward).parameters)[1:]
        self._state_arguments = state_arguments
        self.replace: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None
        for path, parameter in block.named_parameters():
            if ".lora_" in path:
                self._keep(path, parameter)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The states: a tuple, or a single tensor if there is only one."""
        given = dict(zip(self._names, arguments, strict=False)) | named
        values = [given.get(name) for name in self._state_arguments]
        states = tuple(value.detach() for value in values if value is not None)
        if self.replace is not None:
            states = self.replace(states)
        return states[0] if len(states) == 1 else states

    def _keep(self, path: str, parameter: nn.Parameter) -> None:
        *parents, name = path.split(".")
        module: nn.Module = self
        for parent in parents:
            if parent not in dict(module.named_children()):
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        module.register_parameter(name, parameter)


def change_arguments(block: nn.Module, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Lets a function change the block's arguments, given by name, before every forward."""
    names = tuple(inspect.signature(type(block).forward).parameters)[1:]

    def changed(_block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = change(dict(zip(names, arguments, strict=False)) | named)
        return tuple(given[name] for name in names[: len(arguments)]), {name: given[name] for name in named}

    block.register_forward_pre_hook(changed, with_kwargs=True)


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
