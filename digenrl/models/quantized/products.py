"""Products with quantized weights and their input gradients. No copy of the weights in another dtype is kept.

nf4 and int8 are dequantized for each product, in the backward again. The operators are opaque to the compiler: it
would find that forward and backward dequantize the same weights, and keep the result in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.flop_counter import register_flop_formula

from digenrl.models.quantized.formats import dequantize_nf4, dequantize_rows, nf4_pairs, quantize_fp8


@cache
def _fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiled at its first use: torch.compile imports the compiler, which takes seconds."""
    return torch.compile(function, dynamic=True)


def dequantize(
    precision: str, qweight: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype, fused: bool = False
) -> Tensor:
    """The weights (N, K); `fused` compiles the arithmetic to one kernel."""
    if precision == "nf4":
        function = _fused(dequantize_nf4) if fused else dequantize_nf4
        return function(qweight, scale, nf4_pairs(qweight.device), shape, dtype)
    return (_fused(dequantize_rows) if fused else dequantize_rows)(qweight, scale, dtype)


@torch.library.custom_op("digenrl::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor | None, outputs: int, precision: str, fused: bool
) -> Tensor:
    """x W^T + b in the dtype of x."""
    weight_NK = dequantize(precision, qweight, scale, (outputs, x.shape[-1]), x.dtype, fused)
    return linear(x, weight_NK, None if bias is None else bias.to(x.dtype)).contiguous()


@quantized_linear.register_fake
def _(
    x: Tensor, qweight: Tensor, scale: Tensor, bias: Tensor | None, outputs: int, precision: str, fused: bool
) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


@torch.library.custom_op("digenrl::quantized_linear_backward", mutates_args=())
def quantized_linear_backward(
    gradient: Tensor, qweight: Tensor, scale: Tensor, inputs: int, precision: str, fused: bool
) -> Tensor:
    """The gradient of x."""
    shape = (gradient.shape[-1], inputs)
    weight_NK = dequantize(precision, qweight, scale, shape, gradient.dtype, fused)
    return (gradient @ weight_NK).contiguous()


@quantized_linear_backward.register_fake
def _(gradient: Tensor, qweight: Tensor, scale: Tensor, inputs: int, precision: str, fused: bool) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], inputs))


def _keep_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, qweight, scale, _, _, precision, fused = inputs
    ctx.save_for_backward(qweight, scale)
    ctx.settings = (x.shape[-1], precision, fused)


def _input_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x_gradient = quantized_linear_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return (x_gradient, *[None] * 6)


quantized_linear.register_autograd(_input_gradient, setup_context=_keep_weights)


@register_flop_formula(torch.ops.digenrl.quantized_linear)
def _product_flop(x_shape: tuple[int, ...], *others: Any, **named: Any) -> int:
    """As that of a linear layer; torch's counter does not see inside custom operators."""
    outputs: int = others[3]
    return 2 * prod(x_shape) * outputs


@register_flop_formula(torch.ops.digenrl.quantized_linear_backward)
def _backward_flop(gradient_shape: tuple[int, ...], *others: Any, **named: Any) -> int:
    inputs: int = others[2]
    return 2 * prod(gradient_shape) * inputs


class Fp8Linear(torch.autograd.Function):
    """x W^T with x and W in e4m3, and the input gradient from a transposed copy of W with scales of its own.

    Rows of x are quantized independently of each other, unless `values` and `scale` have them already.
    `native` multiplies with the card's fp8 units; otherwise the same values are multiplied in the dtype of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        qweight_NK: Tensor,
        scale_N1: Tensor,
        transposed_KN: Tensor | None,
        transposed_scale_K1: Tensor | None,
        native: bool,
        values_MK: Tensor | None,
        scale_M1: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(transposed_KN, transposed_scale_K1)
        ctx.native = native
        return fp8_product(x, qweight_NK, scale_N1, native, values_MK, scale_M1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        transposed_KN, scale_K1 = ctx.saved_tensors
        assert transposed_KN is not None, "loaded for generating only: there is no transposed copy of the weights"
        return (fp8_product(gradient, transposed_KN, scale_K1, ctx.native), *[None] * 7)


def fp8_product(
    x: Tensor,
    qweight_NK: Tensor,
    scale_N1: Tensor,
    native: bool,
    values_MK: Tensor | None = None,
    scale_M1: Tensor | None = None,
) -> Tensor:
    """x W^T in the dtype of x, whose rows are quantized unless `values` and `scale` have them already."""
    if values_MK is None or scale_M1 is None:
        values_MK, scale_M1 = quantize_fp8(x.reshape(-1, x.shape[-1]))
    product_MN = multiplied_fp8(values_MK, scale_M1, qweight_NK, scale_N1, native, x.dtype)
    return product_MN.view(*x.shape[:-1], product_MN.shape[1])


def multiplied_fp8(
    values_MK: Tensor, scale_M1: Tensor, qweight_NK: Tensor, scale_N1: Tensor, native: bool, dtype: torch.dtype
) -> Tensor:
    """The product of rows in e4m3 with weights in e4m3."""
    if native:
        return torch._scaled_mm(
            values_MK,
            qweight_NK.t(),  # column-major, as the card's fp8 units need it
            scale_a=scale_M1,
            scale_b=scale_N1.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ).to(dtype)
    sums_MN = linear(values_MK.to(dtype), qweight_NK.to(dtype)).float()
    return (sums_MN * scale_M1 * scale_N1.t()).to(dtype)


@cache
def has_fp8_units(device: torch.device) -> bool:
    """Whether the card multiplies fp8 numbers (compute capability 8.9 or higher)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
