"""GELU (tanh) after a linear layer of a compiled block, in fewer passes over memory.

Without gradient it is computed by the product itself, before its result is written. Otherwise it is computed from
a sigmoid, which is the same function and faster than a tanh on a GPU.
"""

from __future__ import annotations

from math import pi, sqrt

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

SLOPE, CUBIC = sqrt(8 / pi), 0.044715  # of the sigmoid, as in the approximation by a tanh


@torch.library.custom_op("digenrl::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU of x W^T + b. torch's fused product uses the tanh on a GPU, but the exact GELU on a CPU."""
    if not x.is_cuda:
        return gelu(linear(x, weight, bias), approximate="tanh")
    product = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return product.view(*x.shape[:-1], -1)


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], len(weight)))


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """GELU (tanh), computed in fp32 (fp64 in an fp64 model)."""
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    return (value * _gate(value)).to(x.dtype)


def gelu_gradient(x: Tensor) -> Tensor:
    """The derivative of GELU (tanh), computed in the same way."""
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    gate = _gate(value)
    slope = gate + value * gate * (1 - gate) * SLOPE * (1 + 3 * CUBIC * value * value)
    return slope.to(x.dtype)


def _gate(value: Tensor) -> Tensor:
    return torch.sigmoid(SLOPE * (value + CUBIC * value * value * value))


def in_product(x: Tensor) -> bool:
    """Whether the product computes the GELU: in compiled forwards without gradient."""
    plain = not torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type)
    return torch.compiler.is_compiling() and plain


class LinearWithGelu(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not in_product(x):
            return super().forward(x)
        product: Tensor = linear_gelu(x, self.weight, self.bias)
        return product


class GeluAfterLinear(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return _after(x, self.joined)  # type: ignore[arg-type]


class LinearAndGelu(GELU):  # type: ignore[misc]
    """diffusers' module of both."""

    def gelu(self, gate: Tensor) -> Tensor:
        return _after(gate, self.joined)


def _after(x: Tensor, joined: bool) -> Tensor:
    if joined and in_product(x):
        return x
    return gelu_by_sigmoid(x) if torch.compiler.is_compiling() else gelu(x, approximate="tanh")


def fuse_gelus(block: nn.Module) -> None:
    """Prepares the GELUs (tanh) of a block that will be compiled. Eagerly it computes what it did before."""
    for layer in block.modules():
        activation = layer if isinstance(layer, GELU) else getattr(layer, "act_mlp", None)
        if not isinstance(activation, GELU | nn.GELU) or activation.approximate != "tanh":
            continue
        linear_layer = layer.proj if activation is layer else layer.proj_mlp
        joined = type(linear_layer) is nn.Linear and linear_layer.bias is not None
        if joined:
            linear_layer.__class__ = LinearWithGelu
        activation.__class__ = LinearAndGelu if activation is layer else GeluAfterLinear
        activation.joined = joined
