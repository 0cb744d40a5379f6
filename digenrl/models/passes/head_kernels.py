"""Triton kernels for what lies between projections and attention: adapters, RMS norm, rotation, joining streams.

They are imported only where there is a GPU. A program has some heads of a few tokens, whose rotation is read once.
It reads the projection once, and writes every head at its place in the joint sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton
from triton import jit

TOKENS, HEADS = 32, 8  # of a program, which has Triton's usual 4 warps; measured best on an H200
SMALLEST_PRODUCT = 16  # the least number of inputs of `tl.dot`
# These differ between prompts, and Triton would compile another kernel for multiples of 16.
LENGTHS = ("tokens", "joint_tokens", "offset")


def join_streams(
    streams: Sequence[Sequence[Tensor | None]], width: int, eps: float, keeps_sums: bool
) -> tuple[Tensor, Tensor]:
    """The heads of all streams in order, (B, J, H, D), and what the layers put out, if it is kept."""
    bases = [stream[0] for stream in streams if stream[0] is not None]
    rows, _, channels = bases[0].shape
    shape = rows, sum(base.shape[1] for base in bases), channels // width, width
    joint_BJHD, sums_BJHD = bases[0].new_empty(shape), bases[0].new_empty(shape if keeps_sums else 0)
    offset = 0
    for base_BSW, stream in zip(bases, streams, strict=True):
        _join_stream(joint_BJHD, sums_BJHD if keeps_sums else None, offset, eps, base_BSW, *stream[1:])
        offset += base_BSW.shape[1]
    return joint_BJHD, sums_BJHD


def _join_stream(
    joint_BJHD: Tensor,
    sums_BJHD: Tensor | None,
    offset: int,
    eps: float,
    base_BSW: Tensor,
    low_MR: Tensor | None,
    up_WR: Tensor | None,
    bias_W: Tensor | None,
    norm_D: Tensor | None,
    table_SP2: Tensor | None,
) -> None:
    """Writes one stream's heads into the joint sequence from token `offset` on."""
    rows, tokens, _ = base_BSW.shape
    _, joint_tokens, heads, width = joint_BJHD.shape
    rank = 0 if low_MR is None else low_MR.shape[1]
    assert base_BSW.is_contiguous() and (low_MR is None or low_MR.stride(1) == 1), "channels are contiguous"
    at_once = gcd(heads, HEADS)
    wrap_triton(_join)[(_programs(tokens), rows, heads // at_once)](
        base_BSW,
        low_MR,
        None if up_WR is None else up_WR.contiguous(),
        bias_W,
        norm_D,
        None if table_SP2 is None else table_SP2.contiguous(),
        joint_BJHD,
        sums_BJHD,
        tokens,
        joint_tokens,
        offset,
        heads,
        0 if low_MR is None else low_MR.stride(0),
        rank,
        EPS=eps,
        TOKENS=TOKENS,
        HEADS=at_once,
        WIDTH=width,
        RANK=max(SMALLEST_PRODUCT, triton.next_power_of_2(rank)) if rank else 0,
    )


def split_stream(
    gradient_BJHD: Tensor,
    sums_BJHD: Tensor,
    offset: int,
    tokens: int,
    norm_D: Tensor | None,
    table_SP2: Tensor | None,
    eps: float,
) -> Tensor:
    """The gradient of what one stream's layer put out, (B, S, W)."""
    rows, joint_tokens, heads, width = gradient_BJHD.shape
    result_BSW = gradient_BJHD.new_empty(rows, tokens, heads * width)
    assert gradient_BJHD.stride(3) == 1, "channels are contiguous"
    at_once = gcd(heads, HEADS)
    wrap_triton(_split)[(_programs(tokens), rows, heads // at_once)](
        gradient_BJHD,
        None if norm_D is None else sums_BJHD,
        norm_D,
        None if table_SP2 is None else table_SP2.contiguous(),
        result_BSW,
        tokens,
        joint_tokens,
        offset,
        heads,
        *gradient_BJHD.stride()[:3],
        EPS=eps,
        TOKENS=TOKENS,
        HEADS=at_once,
        WIDTH=width,
    )
    return result_BSW


def _programs(tokens: int) -> int:
    """`triton.cdiv`, but also of a length that the compiler keeps variable."""
    return (tokens + TOKENS - 1) // TOKENS


@jit  # type: ignore[untyped-decorator]
def _rotation(table, token, inside, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The cosines and sines of these tokens, (tokens, pairs) each."""
    place = token[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(table + place, mask=inside, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(values, (token.shape[0], WIDTH // 2, 2)))


@jit  # type: ignore[untyped-decorator]
def _rotated(value, cos, sin, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotates every pair of neighboring channels."""
    first, second = tl.split(tl.reshape(value, (value.shape[0], WIDTH // 2, 2)))
    pairs = tl.join(first * cos - second * sin, first * sin + second * cos)
    return tl.reshape(pairs, (value.shape[0], WIDTH))


@jit(do_not_specialize=LENGTHS)  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    base,
    low,
    up,
    bias,
    norm,
    table,
    joint,
    sums,
    tokens,
    joint_tokens,
    offset,
    heads,
    low_stride,
    rank,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
):
    """Some heads of a few tokens per program."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None]
    if RANK > 0:
        part = tl.arange(0, RANK)
        lows = tl.load(
            low + (row * tokens + token)[:, None] * low_stride + part[None, :],
            mask=inside & (part < rank)[None, :],
            other=0.0,
        )
    if table is not None:
        cos, sin = _rotation(table, token, inside, WIDTH)
    if norm is not None:
        weight = tl.load(norm + channel).to(tl.float32)[None, :]
    for step in range(HEADS):
        head = tl.program_id(2) * HEADS + step
        source = ((row * tokens + token) * heads + head)[:, None] * WIDTH + channel[None, :]
        value = tl.load(base + source, mask=inside, other=0.0).to(tl.float32)
        if RANK > 0:
            ups = tl.load(
                up + (head * WIDTH + channel)[None, :] * rank + part[:, None],
                mask=(part < rank)[:, None],
                other=0.0,
            )
            value += tl.dot(lows, ups, input_precision="ieee")
        if bias is not None:
            value += tl.load(bias + head * WIDTH + channel).to(tl.float32)[None, :]
        place = ((row * joint_tokens + offset + token) * heads + head)[:, None] * WIDTH + channel[None, :]
        output = value.to(joint.dtype.element_ty)  # rounded as the output of a layer
        if sums is not None:
            tl.store(sums + place, output, mask=inside)
        if norm is not None:
            value = output.to(tl.float32)
            value = value * tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + EPS)[:, None] * weight
        if table is not None:
            value = _rotated(value, cos, sin, WIDTH)
        tl.store(joint + place, value.to(joint.dtype.element_ty), mask=inside)


@jit(do_not_specialize=LENGTHS)  # type: ignore[untyped-decorator]
def _split(  # type: ignore[no-untyped-def]
    gradient,
    sums,
    norm,
    table,
    result,
    tokens,
    joint_tokens,
    offset,
    heads,
    row_stride,
    token_stride,
    head_stride,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Some heads of a few tokens per program."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None]
    if table is not None:
        cos, sin = _rotation(table, token, inside, WIDTH)
    if norm is not None:
        weight = tl.load(norm + channel).to(tl.float32)[None, :]
    gradient += row * row_stride
    for step in range(HEADS):
        head = tl.program_id(2) * HEADS + step
        source = (offset + token)[:, None] * token_stride + head * head_stride + channel[None, :]
        value = tl.load(gradient + source, mask=inside, other=0.0).to(tl.float32)
        if table is not None:
            value = _rotated(value, cos, -sin, WIDTH)
        if norm is not None:
            place = ((row * joint_tokens + offset + token) * heads + head)[:, None] * WIDTH + channel[None, :]
            output = tl.load(sums + place, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(output * output, axis=1) / WIDTH + EPS)[:, None]
            value, normed = value * weight, output * scale
            value = scale * (value - normed * (tl.sum(value * normed, axis=1) / WIDTH)[:, None])
        place = ((row * tokens + token) * heads + head)[:, None] * WIDTH + channel[None, :]
        tl.store(result + place, value.to(result.dtype.element_ty), mask=inside)
