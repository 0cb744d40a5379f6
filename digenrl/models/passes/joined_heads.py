"""Queries, keys and values of one or two streams in one joint sequence, in few passes over memory.

What lies between the projections and attention is one operator here: it adds bias and adapters, normalizes,
rotates, and writes every token to its place. The compiler would compute the parts of both streams for every token
of the joint sequence, which takes several times as long.
Shape legend: B = rows, S = tokens of one stream, J = tokens of all, M = B * S, H = heads, D = a head's width,
W = H * D, P = D / 2 pairs of channels, R = rank of the adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from digenrl.models.adapters.lora import Product, products_of
from digenrl.models.passes.kernel_operator import HAS_TRITON, kernel_operator
from digenrl.models.passes.rotation import rotated

if HAS_TRITON:
    from digenrl.models.passes.head_kernels import join_streams, split_stream

PARTS = 6  # of a stream, as an operator takes them
LARGEST_RANK = 64  # of adapters that the kernel adds: a head's part of them has to fit in shared memory
SMALLEST_WIDTH = 16  # of a head: the least that a matrix product in a kernel can have


class Stream(NamedTuple):
    """The layers of one stream, their input, and the rotation of its tokens."""

    layers: Sequence[nn.Module]  # of queries, keys and values
    norms: Sequence[nn.Module]  # of queries and keys
    states_BSW: Tensor
    table_SP2: Tensor  # the cosine and sine of every pair of channels

    @classmethod
    def of_image(cls, attn: Any, states_BSW: Tensor, table_SP2: Tensor) -> Stream:
        """The image, or the only stream, of diffusers' attention modules."""
        return cls((attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k), states_BSW, table_SP2)

    @classmethod
    def of_text(cls, attn: Any, states_BSW: Tensor, table_SP2: Tensor) -> Stream:
        """The stream that diffusers' attention modules add to the image."""
        layers = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
        return cls(layers, (attn.norm_added_q, attn.norm_added_k), states_BSW, table_SP2)


@kernel_operator("digenrl::joined_heads")
def joined_heads(
    streams: Sequence[Tensor | None], width: int, eps: float, keeps_sums: bool
) -> tuple[Tensor, Tensor]:
    """The heads of all streams in order, (B, J, H, D), and what the layers put out, if it is kept.

    A stream is base (B, S, W), low (M, R), up (W, R), bias, norm and table; all but the base may be None.
    """
    parts = _by_stream(streams)
    if HAS_TRITON and streams[0] is not None and streams[0].is_cuda:
        return join_streams(parts, width, eps, keeps_sums)
    joined, sums = [], []
    for base_BSW, low_MR, up_WR, bias_W, norm_D, table_SP2 in parts:
        assert base_BSW is not None
        output_BSW = _output(base_BSW, low_MR, up_WR, bias_W)
        sums.append(output_BSW.unflatten(-1, (-1, width)))  # type: ignore[no-untyped-call]
        joined.append(_normed_and_rotated(sums[-1], norm_D, table_SP2, eps))
    joint_BJHD = torch.cat(joined, dim=1)
    return joint_BJHD, torch.cat(sums, dim=1) if keeps_sums else joint_BJHD.new_empty(0)


@kernel_operator("digenrl::joined_heads_backward")
def joined_heads_backward(
    gradient_BJHD: Tensor, sums_BJHD: Tensor, tables: Sequence[Tensor | None], tokens: Sequence[int], eps: float
) -> list[Tensor]:
    """The gradients of what the layers put out, (B, S, W) each. `tables` are norm and rotation by stream."""
    gradients, offset = [], 0
    if gradient_BJHD.stride(-1) != 1:
        gradient_BJHD = gradient_BJHD.contiguous()
    for number, length in enumerate(tokens):
        norm_D, table_SP2 = tables[2 * number : 2 * number + 2]
        if HAS_TRITON and gradient_BJHD.is_cuda:
            part = split_stream(gradient_BJHD, sums_BJHD, offset, length, norm_D, table_SP2, eps)
        else:
            piece = slice(offset, offset + length)
            output_BSHD = None if norm_D is None else sums_BJHD[:, piece]
            part = _output_gradient(gradient_BJHD[:, piece], output_BSHD, norm_D, table_SP2, eps)
        gradients.append(part)
        offset += length
    return gradients


def _by_stream(streams: Sequence[Tensor | None]) -> list[Sequence[Tensor | None]]:
    return [streams[first : first + PARTS] for first in range(0, len(streams), PARTS)]


def _output(base_BSW: Tensor, low_MR: Tensor | None, up_WR: Tensor | None, bias_W: Tensor | None) -> Tensor:
    output_BSW = base_BSW
    if low_MR is not None and up_WR is not None:
        output_BSW = output_BSW + (low_MR @ up_WR.t()).view_as(base_BSW)
    return output_BSW if bias_W is None else output_BSW + bias_W


def _normed_and_rotated(value_BSHD: Tensor, norm_D: Tensor | None, table_SP2: Tensor | None, eps: float) -> Tensor:
    value = value_BSHD.float()
    if norm_D is not None:
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * norm_D.float()
    if table_SP2 is not None:
        value = rotated(value, table_SP2)
    return value.to(value_BSHD.dtype)


def _output_gradient(
    gradient_BSHD: Tensor,
    output_BSHD: Tensor | None,
    norm_D: Tensor | None,
    table_SP2: Tensor | None,
    eps: float,
) -> Tensor:
    """The gradient of what `_normed_and_rotated` was given, (B, S, W)."""
    value = gradient_BSHD.float()
    if table_SP2 is not None:
        value = rotated(value, table_SP2 * table_SP2.new_tensor([1, -1]))  # back
    if norm_D is not None and output_BSHD is not None:
        output = output_BSHD.float()
        scale = torch.rsqrt(output.square().mean(-1, keepdim=True) + eps)
        value, normed = value * norm_D.float(), output * scale
        value = scale * (value - normed * (value * normed).mean(-1, keepdim=True))
    return value.to(gradient_BSHD.dtype).flatten(2).clone()


class _JoinedHeads(torch.autograd.Function):
    """Bases, adapters and their inputs have gradients; biases, norms and rotations do not."""

    @staticmethod
    def forward(ctx: Any, width: int, eps: float, keeps_sums: bool, *streams: Tensor | None) -> Tensor:
        joint_BJHD: Tensor
        joint_BJHD, sums_BJHD = joined_heads(list(streams), width, eps, keeps_sums)
        parts = _by_stream(streams)
        ctx.save_for_backward(sums_BJHD, *(part for stream in parts for part in (*stream[1:3], *stream[4:])))
        ctx.tokens, ctx.eps = [stream[0].shape[1] for stream in parts], eps  # type: ignore[union-attr]
        return joint_BJHD

    @staticmethod
    def backward(ctx: Any, gradient_BJHD: Tensor) -> tuple[Tensor | None, ...]:
        sums_BJHD, *saved = ctx.saved_tensors
        parts = [saved[first : first + 4] for first in range(0, len(saved), 4)]
        tables = [table for stream in parts for table in stream[2:]]
        gradients: list[Tensor | None] = []
        outputs = joined_heads_backward(gradient_BJHD, sums_BJHD, tables, ctx.tokens, ctx.eps)
        for output_BSW, (low_MR, up_WR, *_) in zip(outputs, parts, strict=True):
            adapters: tuple[Tensor | None, Tensor | None] = None, None
            if low_MR is not None:
                output_MW = output_BSW.flatten(0, 1)
                adapters = output_MW @ up_WR, output_MW.t() @ low_MR
            gradients += [output_BSW, *adapters, None, None, None]
        return (None, None, None, *gradients)


def fused_heads(streams: Sequence[Stream], width: int) -> list[Tensor]:
    """Queries, keys and values of streams that `can_fuse`, (B, J, H, D) each."""
    products = [products_of(stream.layers, stream.states_BSW) for stream in streams]
    eps: float = streams[0].norms[0].eps  # type: ignore[assignment]
    joined = []
    for number in range(3):
        parts: list[Tensor | None] = []
        for stream, product in zip(streams, products, strict=True):
            parts += _parts(product[number], stream, number)
        keeps_sums = number < 2 and torch.is_grad_enabled()
        joined.append(_JoinedHeads.apply(width, eps, keeps_sums, *parts))  # type: ignore[no-untyped-call]
    return joined


def _parts(product: Product, stream: Stream, number: int) -> list[Tensor | None]:
    low_MR, up_WR = product.low_MR, product.up_WR
    if low_MR is not None and up_WR is not None and low_MR.shape[1] > LARGEST_RANK:
        adapted = product.base + linear(low_MR, up_WR).view_as(product.base)
        product = Product(adapted, None, None, product.bias_W)
    if number == 2:  # values are neither normalized nor rotated
        return [*product, None, None]
    norm: Any = stream.norms[number].weight
    return [*product, norm, stream.table_SP2]


def can_fuse(streams: Sequence[Stream], width: int) -> bool:
    """Whether the streams are being compiled, with norms and biases that are not trained."""
    states = streams[0].states_BSW
    kind, dtype = states.device.type, states.dtype
    norms = [norm for stream in streams for norm in stream.norms]
    if not torch.compiler.is_compiling() or torch.is_autocast_enabled(kind) or dtype == torch.float64:
        return False
    if width < SMALLEST_WIDTH or width & (width - 1) or len({getattr(norm, "eps", None) for norm in norms}) != 1:
        return False
    biases = [getattr(layer, "bias", None) for stream in streams for layer in stream.layers]
    weights = [getattr(norm, "weight", None) for norm in norms]
    plain = all(isinstance(weight, Tensor) for weight in weights) and norms[0].eps is not None
    return plain and not any(each is not None and each.requires_grad for each in (*biases, *weights))
