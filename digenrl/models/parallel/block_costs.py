"""The work and the size of each block of a transformer's chain, from the shapes of its weights alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from digenrl.models.blocks import block_places

ONCE_PER_SAMPLE = ("norm", "mod")  # in the path of layers that multiply a vector of the time step, not tokens
TEXT_STREAM = "add_q_proj"  # a layer of blocks with weights of their own for text tokens


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """`work` is relative, for each block; `parameters` are its weights, and `others` those outside the chain."""

    work: tuple[float, ...]
    parameters: tuple[int, ...]
    others: int


def chain_costs(transformer: nn.Module, blocks_before_chain: tuple[str, ...]) -> ChainCosts:
    """Counts the weights of a transformer, which may be on the meta device. Adapters are left out."""
    chain = [each[index] for name, each, index in block_places(transformer) if name not in blocks_before_chain]
    sizes = tuple(_parameters(block) for block in chain)
    return ChainCosts(tuple(map(block_work, chain)), sizes, _parameters(transformer) - sum(sizes))


def block_work(block: nn.Module) -> float:
    """The weights that a token is multiplied with. Attention is left out: blocks of a chain have equal amounts.

    In a block with weights of their own for image and for text tokens, a token meets half of them.
    """
    weights = sum(
        weight.numel()
        for path, weight in block.named_parameters()
        if weight.dim() > 1 and not _is_adapter(path) and not any(part in path for part in ONCE_PER_SAMPLE)
    )
    streams = 2 if any(path.endswith(TEXT_STREAM) for path, _ in block.named_modules()) else 1
    return weights / streams


def _parameters(module: nn.Module) -> int:
    return sum(weight.numel() for path, weight in module.named_parameters() if not _is_adapter(path))


def _is_adapter(path: str) -> bool:
    return ".lora_" in path
