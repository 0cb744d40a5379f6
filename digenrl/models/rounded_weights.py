"""Finds trained weights that the model rounds to bfloat16 before every use, and that can be sent rounded."""

from __future__ import annotations

import torch
from torch import nn

from digenrl.models.adapters.lora import ADAPTER, AdaptedLinear, has_lora, published_name
from digenrl.models.contract import DiffusionModel
from digenrl.models.quantized.layers import QuantizedLinear

MULTIPLYING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # layers that autocast computes in bfloat16


def rounded_before_use(model: DiffusionModel, *, autocast: bool) -> frozenset[str]:
    """Published names of weights whose rounding to bfloat16 changes no bit of the velocity or its gradient.

    An adapter is cast to the dtype of its layer's input, which is that of the layer's frozen weights. Under
    `autocast`, all adapters are cast, and so are the weights of all layers that multiply.
    """
    adapted = has_lora(model)
    names = set[str]()
    for path, layer in model.transformer.named_modules():
        if adapted and isinstance(layer, AdaptedLinear) and (autocast or _dtype(layer) is torch.bfloat16):
            names |= {f"{path}.{part}.{ADAPTER}.weight" for part in ("lora_A", "lora_B")}
        elif not adapted and autocast and isinstance(layer, MULTIPLYING):
            own = layer.named_parameters(recurse=False)
            names |= {f"{path}.{name}" for name, parameter in own if parameter.dtype is torch.float32}
    return frozenset(published_name(name) for name in names)


def _dtype(layer: AdaptedLinear) -> torch.dtype:
    """In which an adapted layer multiplies."""
    base = layer.base_layer
    return base.dtype if isinstance(base, QuantizedLinear) else base.weight.dtype
