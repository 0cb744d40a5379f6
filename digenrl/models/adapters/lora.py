"""LoRA adapters on a model's transformer: adding them, and disabling them for the reference policy.

`digenrl.models.adapters.lora_files` writes and reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import Any, Literal, NamedTuple

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import linear

from digenrl.config.reading import ConfigError, nearest
from digenrl.config.recipes.recipe import Expert
from digenrl.models.contract import DiffusionModel
from digenrl.models.experts import EXPERTS, parts_of, path_in
from digenrl.models.quantized.formats import quantize_fp8
from digenrl.models.quantized.layers import QuantizedLinear

ADAPTER = "default"  # peft's name of the adapter set; a model has one
TARGETS = "training.lora.targets"

Targets = Sequence[str] | str
"""The adapted layers, as peft's target_modules: ends of paths, or a regular expression for whole paths."""


class AdaptedLinear(LoraLinear):  # type: ignore[misc]
    """peft's layer, computing in the dtype of its input although the adapters are kept in a finer one.

    peft's own would compute the adapters in fp32 beside a bf16 base: at a fraction of the speed, and with an fp32
    copy of every input kept for the backward.
    """

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """base(x) + scaling * B A x, or base(x) while adapters are disabled."""
        result: Tensor = self.base_layer(x, *arguments, **named)
        if self.disable_adapters:
            return result
        return self.with_adapter(result, linear(x, self.lora_A[ADAPTER].weight.to(x.dtype)))

    def with_adapter(self, base: Tensor, low: Tensor) -> Tensor:
        """base + scaling * B low, where low is A x."""
        up = self.lora_B[ADAPTER].weight.to(low.dtype)
        adapted: Tensor = base + linear(low, up).view_as(base) * self.scaling[ADAPTER]
        return adapted


def outputs_of(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """The outputs of layers with the same input. If all have adapters, x is multiplied by all A in one product."""
    adapted = [layer for layer in layers if isinstance(layer, AdaptedLinear) and not layer.disable_adapters]
    if len(adapted) < len(layers):
        return [layer(x) for layer in layers]
    lows = _lows(adapted, x)
    return [layer.with_adapter(layer.base_layer(x), low) for layer, low in zip(adapted, lows, strict=True)]


class Product(NamedTuple):
    """A layer's output in parts: base + low up^T + bias. Shape legend: M = tokens, R = rank, W = outputs."""

    base: Tensor
    low_MR: Tensor | None
    up_WR: Tensor | None
    bias_W: Tensor | None


def products_of(layers: Sequence[nn.Module], x: Tensor) -> list[Product]:
    """As `outputs_of`, but the parts are not added yet. Layers with fp8 weights quantize x once."""
    adapted = [layer for layer in layers if isinstance(layer, AdaptedLinear) and not layer.disable_adapters]
    bases: list[Any] = [layer.base_layer if isinstance(layer, AdaptedLinear) else layer for layer in layers]
    fp8 = all(isinstance(base, QuantizedLinear) and base.precision == "fp8" for base in bases)
    quantized = quantize_fp8(x.flatten(0, -2)) if fp8 else (None, None)
    lows, products = iter(_lows(adapted, x)), []
    for layer, base in zip(layers, bases, strict=True):
        product = base.product(x, quantized) if isinstance(base, QuantizedLinear) else linear(x, base.weight)
        bias = None if base.bias is None else base.bias.to(x.dtype)
        if isinstance(layer, AdaptedLinear) and not layer.disable_adapters:
            up = (layer.lora_B[ADAPTER].weight * layer.scaling[ADAPTER]).to(x.dtype)
            products.append(Product(product, next(lows), up, bias))
        else:
            products.append(Product(product, None, None, bias))
    return products


def _lows(adapted: Sequence[AdaptedLinear], x: Tensor) -> Sequence[Tensor]:
    """A x of all layers by one product: each A has few rows, so that one takes about as long as all."""
    if not adapted:
        return []
    downs = [layer.lora_A[ADAPTER].weight.to(x.dtype) for layer in adapted]
    low = linear(x.flatten(0, -2), torch.cat(downs))
    lows: Sequence[Tensor] = low.split([len(down) for down in downs], dim=-1)  # type: ignore[no-untyped-call]
    return lows


def add_lora(
    model: DiffusionModel,
    rank: int,
    alpha: float,
    seed: int,
    targets: Targets | None = None,
    init: Literal["uniform", "gaussian"] = "uniform",
    values_on: torch.device | str | None = None,
    expert: Expert = "both",
) -> None:
    """Adds adapters to the target layers, by default the family's, and freezes everything else.

    B is zero, so the velocity does not change. A is uniform with bound 1 / sqrt(inputs), or Gaussian with standard
    deviation 1 / rank. Adapters are in fp32 (fp64 in an fp64 model) whatever the dtype of the base. Their initial
    values depend only on the seed, not on the device. Those of a model without weights have no values either,
    unless `values_on` is a device for them. `expert` selects one of two transformers. Raises ConfigError if a
    target matches no linear layer.
    """
    if rank < 1:
        raise ConfigError(f"LoRA rank must be at least 1, got {rank}")
    if has_lora(model):
        raise ValueError(f"{model.family} already has LoRA adapters; a model takes one set")
    if targets is not None:
        check_targets(model.transformer, targets)
    for name, part in parts_of(model.transformer).items():
        if name in ("", *EXPERTS[expert]):
            config = lora_config(rank, alpha, model.lora_targets if targets is None else targets)
            config._register_custom_module({nn.Linear: AdaptedLinear})
            config.init_lora_weights = False  # the values are set below
            part.add_adapter(config, ADAPTER)
        else:
            part.requires_grad_(False)
    if values_on is not None:
        _allocate_adapters(model.transformer, values_on)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_parameters(model).items():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        if parameter.is_meta:  # only shapes are wanted
            continue
        if ".lora_A." not in name:
            parameter.data.zero_()
            continue
        initial = torch.empty(parameter.shape)
        if init == "gaussian":
            initial.normal_(std=1 / rank, generator=generator)
        else:
            bound = 1 / sqrt(parameter.shape[1])
            initial.uniform_(-bound, bound, generator=generator)
        parameter.data.copy_(initial)


def _allocate_adapters(transformer: nn.Module, device: torch.device | str) -> None:
    for path, parameter in list(transformer.named_parameters()):
        if ".lora_" in path and parameter.is_meta:
            layer, _, name = path.rpartition(".")
            allocated = nn.Parameter(torch.empty_like(parameter, device=device))
            setattr(transformer.get_submodule(layer), name, allocated)


def lora_config(rank: int, alpha: float, targets: Targets) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets if isinstance(targets, str) else [*targets])


def target_layers(transformer: nn.Module, targets: Targets) -> list[str]:
    """The paths of the linear layers that the targets match, in the transformer's order."""
    patterns = _patterns(targets).values()
    return [
        path_in(name, path)
        for name, part in parts_of(transformer).items()
        for path in _linears(part)
        if any(re.fullmatch(each, path) for each in patterns)
    ]


def check_targets(transformer: nn.Module, targets: Targets, where: str = TARGETS) -> None:
    """Raises ConfigError if a target, given at `where`, matches nothing, or no linear layer."""
    transformer = next(iter(parts_of(transformer).values()))  # two transformers have the same layers
    linears = _linears(transformer)
    known = sorted({layer_kind(path) for path in linears})
    for target, pattern in _patterns(targets).items():
        matching = [path for path, _ in transformer.named_modules() if re.fullmatch(pattern, path)]
        others = [path for path in matching if path not in linears]
        if not matching or others:
            what = f"{others[0]}, which is not a linear layer" if others else "no layer"
            raise ConfigError(f"{where}: '{target}' matches {what}; {nearest(target, known)}", where)


def _patterns(targets: Targets) -> dict[str, str]:
    """A regular expression for whole paths by target."""
    if isinstance(targets, str):
        return {targets: targets}
    return {target: rf"(.*\.)?{re.escape(target)}" for target in targets}


def _linears(transformer: nn.Module) -> dict[str, nn.Linear]:
    return {path: module for path, module in transformer.named_modules() if isinstance(module, nn.Linear)}


def layer_kind(path: str) -> str:
    """A layer's path from its block on, which names the same layer of all blocks: `attn.to_q`."""
    return re.sub(r"^.*?\.\d+\.", "", path)


def has_lora(model: DiffusionModel) -> bool:
    return any(isinstance(module, BaseTunerLayer) for module in model.transformer.modules())


@contextmanager
def adapters_disabled(model: DiffusionModel) -> Iterator[None]:
    """Inside, the model computes exactly the base model's velocity, the reference policy. Can be nested."""
    layers = [module for module in model.transformer.modules() if isinstance(module, BaseTunerLayer)]
    if not layers:
        raise ValueError(f"{model.family} has no LoRA adapters to disable; call add_lora first")
    were_on = [layer for layer in layers if not layer.disable_adapters]
    # peft's switch also changes requires_grad, which is up to the trainer.
    needed_grad = [parameter.requires_grad for parameter in adapter_parameters(model).values()]
    for layer in were_on:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in were_on:
            layer.enable_adapters(enabled=True)
        for parameter, needed in zip(adapter_parameters(model).values(), needed_grad, strict=True):
            parameter.requires_grad_(needed)


def published_name(parameter: str) -> str:
    """A parameter's name in a published version, which leaves out peft's name of the adapter set."""
    return parameter.replace(f".{ADAPTER}.", ".") if ".lora_" in parameter else parameter


def adapter_parameters(model: DiffusionModel) -> dict[str, nn.Parameter]:
    """All adapter weights by published name; empty without LoRA."""
    parameters = model.transformer.named_parameters()
    return {published_name(name): parameter for name, parameter in parameters if ".lora_" in name}
