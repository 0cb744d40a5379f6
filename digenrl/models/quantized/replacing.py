"""Quantizes the linear layers of a model's repeated blocks, one after the other.

The whole model is never on the device in its original dtype. Norms, embedders and the final projection, which are
small and sensitive, keep their dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.base_precision import UNQUANTIZED
from digenrl.models.blocks import repeated_blocks
from digenrl.models.quantized.layers import QuantizedLinear


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The format of a transformer's frozen weights; a model that `trains` keeps what its backward needs."""

    precision: str = UNQUANTIZED
    trains: bool = True

    @property
    def quantized(self) -> bool:
        return self.precision != UNQUANTIZED


def quantize_transformer(transformer: nn.Module, base: BaseWeights, device: torch.device | str) -> None:
    """Quantizes the linear layers of a transformer's blocks, and moves them to the device."""
    if base.quantized:
        check_has_blocks(transformer, base.precision)
        _quantize(_block_linears(transformer), base, device)


def quantize_text_encoder(encoder: nn.Module, precision: str, device: torch.device | str) -> None:
    """Quantizes the linear layers inside lists of layers, which the embeddings of tokens are not."""
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    if precision != UNQUANTIZED:
        _quantize(_linears_in(lists), BaseWeights(precision, trains=False), device)


def block_weights(transformer: nn.Module) -> int:
    """The number of weights that `quantize_transformer` quantizes."""
    return sum(layer.weight.numel() for _, _, layer in _block_linears(transformer))


def check_has_blocks(transformer: nn.Module, precision: str) -> None:
    """Raises ConfigError if the transformer has no repeated blocks, whose layers are what is quantized."""
    if not block_weights(transformer):
        raise ConfigError(
            f"model.base: {precision}, but a {type(transformer).__name__} has no repeated blocks with linear "
            f"layers, which are what is quantized; set it to {UNQUANTIZED}"
        )


@contextmanager
def building_without_linear_weights() -> Iterator[None]:
    """Modules built inside have the weights of linear layers on the meta device; `fill_linears` draws them."""

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if isinstance(module, nn.Linear) and name == "weight" and parameter is not None:
            return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        return None

    with register_module_parameter_registration_hook(without_memory):  # type: ignore[arg-type]
        yield


def fill_linears(transformer: nn.Module, base: BaseWeights, device: torch.device | str) -> None:
    """Gives linear layers without weights random ones, and quantizes those of blocks, one after the other."""
    quantized = {id(layer) for _, _, layer in _block_linears(transformer)}
    places = list(_linears_in([transformer]))
    while places:  # a layer is freed once it is replaced
        parent, name, layer = places.pop()
        if not layer.weight.is_meta:
            continue
        layer.weight = nn.Parameter(torch.empty_like(layer.weight, device=device))
        layer.reset_parameters()
        if id(layer) in quantized:
            setattr(parent, name, QuantizedLinear(layer, base.precision, trains=base.trains))


Place = tuple[nn.Module, str, nn.Linear]  # the parent of a layer, its name there, and the layer


def _block_linears(transformer: nn.Module) -> list[Place]:
    """The linear layers of the blocks, except those that are kept in another dtype than most."""
    found = list(_linears_in(repeated_blocks(transformer)))
    dtypes = [layer.weight.dtype for _, _, layer in found]
    usual = max(set(dtypes), key=dtypes.count, default=None)
    return [place for place in found if place[2].weight.dtype == usual]


def _linears_in(modules: Iterable[nn.Module]) -> Iterator[Place]:
    seen: set[int] = set()
    for module in modules:
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if (
                    isinstance(child, nn.Linear)
                    and not isinstance(child, QuantizedLinear)
                    and id(child) not in seen
                ):
                    seen.add(id(child))
                    yield parent, name, child


def _quantize(places: Iterable[Place], base: BaseWeights, device: torch.device | str) -> None:
    remaining = list(places)
    while remaining:  # a layer is freed once it is replaced
        parent, name, layer = remaining.pop()
        setattr(parent, name, QuantizedLinear(layer, base.precision, device, trains=base.trains))
