"""Feed-forward layers with fp8 weights in compiled blocks, in fewer passes over memory.

They compute W2 [beside, GELU(W1 x + b1)] + b2. Between the products, values and gradients exist in e4m3 only.
`beside` is the attention of blocks that join it to the hidden channels.
Shape legend: M = tokens, K = inputs, N = hidden channels, W = channels of `beside`.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from torch import Tensor, nn

from digenrl.models.passes.fused_gelu import gelu_by_sigmoid, gelu_gradient
from digenrl.models.passes.kernel_operator import HAS_TRITON, kernel_operator
from digenrl.models.quantized.formats import quantize_fp8
from digenrl.models.quantized.layers import QuantizedLinear
from digenrl.models.quantized.products import fp8_product, has_fp8_units, multiplied_fp8

if HAS_TRITON:
    from digenrl.models.quantized.gelu_kernels import gelu_gradient_rows, gelu_rows


@kernel_operator("digenrl::gelu_fp8")
def gelu_fp8(product_MN: Tensor, bias_N: Tensor, beside_MW: Tensor | None) -> tuple[Tensor, Tensor]:
    """[beside, GELU(product + bias)] in e4m3, and the scale of each row."""
    if HAS_TRITON and has_fp8_units(product_MN.device):
        return gelu_rows(product_MN, bias_N, beside_MW)
    hidden_MN = gelu_by_sigmoid(product_MN + bias_N)
    return quantize_fp8(hidden_MN if beside_MW is None else torch.cat([beside_MW, hidden_MN], dim=1))


@kernel_operator("digenrl::gelu_fp8_backward")
def gelu_fp8_backward(gradient_MN: Tensor, product_MN: Tensor, bias_N: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the product in e4m3, and the scale of each row."""
    if HAS_TRITON and has_fp8_units(product_MN.device):
        return gelu_gradient_rows(gradient_MN, product_MN, bias_N)
    return quantize_fp8(gradient_MN * gelu_gradient(product_MN + bias_N))


class _Fp8FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, beside_MW: Tensor | None, bias_N: Tensor, native: bool, *weights: Tensor | None
    ) -> Tensor:
        first, second = weights[:4], weights[4:]
        product_MN = fp8_product(x_MK, first[0], first[1], native)  # type: ignore[arg-type]
        values, scale_M1 = gelu_fp8(product_MN, bias_N, beside_MW)
        ctx.save_for_backward(product_MN, bias_N, *first[2:], *second[2:])
        ctx.native, ctx.width = native, 0 if beside_MW is None else beside_MW.shape[1]
        product = multiplied_fp8(values, scale_M1, second[0], second[1], native, x_MK.dtype)  # type: ignore[arg-type]
        # A tensor of its own: compiled by torch 2.11, a result that is also an intermediate one gets no gradient.
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        product_MN, bias_N, first, first_scale, second, second_scale = ctx.saved_tensors
        assert first is not None, "loaded for generating only: there is no transposed copy of the weights"
        joined = fp8_product(gradient, second, second_scale, ctx.native)
        values, scale_M1 = gelu_fp8_backward(joined[:, ctx.width :], product_MN, bias_N)
        x_gradient = multiplied_fp8(values, scale_M1, first, first_scale, ctx.native, gradient.dtype)
        beside_gradient = joined[:, : ctx.width].contiguous() if ctx.width else None
        return (x_gradient, beside_gradient, *[None] * 10)


def fp8_feed_forward(
    x: Tensor, first: QuantizedLinear, second: QuantizedLinear, beside: Tensor | None = None
) -> Tensor:
    """W2 [beside, GELU(W1 x + b1)] + b2, for layers that `can_fuse`."""
    assert first.bias is not None
    weights = [
        value
        for layer in (first, second)
        for value in (layer.qweight, layer.scale, layer.transposed, layer.transposed_scale)
    ]
    beside_MW = None if beside is None else beside.flatten(0, -2)
    native = first.native and second.native
    product_MN = _Fp8FeedForward.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), beside_MW, first.bias.to(x.dtype), native, *weights
    )
    product: Tensor = product_MN.view(*x.shape[:-1], product_MN.shape[1])
    return product if second.bias is None else product + second.bias.to(x.dtype)


def can_fuse(first: nn.Module, activation: nn.Module, second: nn.Module) -> bool:
    """Whether both layers have fp8 weights and no adapters, with a GELU (tanh) in between."""
    quantized = all(type(layer) is QuantizedLinear and layer.precision == "fp8" for layer in (first, second))
    return quantized and first.bias is not None and getattr(activation, "approximate", None) == "tanh"


class Fp8FeedForward(FeedForward):  # type: ignore[misc]
    """diffusers' feed-forward layer, fused where it is compiled."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if _fuses(hidden_states):
            return fp8_feed_forward(hidden_states, self.net[0].proj, self.net[2])
        output: Tensor = super().forward(hidden_states, *arguments, **named)
        return output


class Fp8FluxBlock(FluxSingleTransformerBlock):  # type: ignore[misc]
    """FLUX's block of one stream, fused where it is compiled."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The text's and the image's tokens."""
        if not _fuses(hidden_states):
            states: tuple[Tensor, Tensor] = super().forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
            )
            return states
        joint = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        normed, gate = self.norm(joint, emb=temb)
        attended = self.attn(
            hidden_states=normed, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {})
        )
        joint = joint + gate.unsqueeze(1) * fp8_feed_forward(normed, self.proj_mlp, self.proj_out, attended)
        text = encoder_hidden_states.shape[1]
        return joint[:, :text], joint[:, text:]


def _fuses(hidden_states: Tensor) -> bool:
    compiling, kind = torch.compiler.is_compiling(), hidden_states.device.type
    return compiling and hidden_states.dtype != torch.float16 and not torch.is_autocast_enabled(kind)


def fuse_feed_forwards(block: nn.Module) -> None:
    """Fuses the feed-forward layers of a block with fp8 weights that will be compiled."""
    if type(block) is FluxSingleTransformerBlock:
        layers: tuple[Any, ...] = (block.proj_mlp, block.act_mlp, block.proj_out)
        if can_fuse(*layers):
            block.__class__ = Fp8FluxBlock
    for layer in block.modules():
        if type(layer) is FeedForward:
            net: Any = layer.net
            plain = len(net) == 3 and isinstance(net[0], GELU) and net[1].p == 0
            if plain and can_fuse(net[0].proj, net[0], net[2]):
                layer.__class__ = Fp8FeedForward
