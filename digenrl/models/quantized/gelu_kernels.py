"""Triton kernels that compute GELU (tanh), or its gradient, and quantize the rows to e4m3.

They are imported only where a GPU has fp8 units. A row stays in registers between the search for its largest value
and the division by its scale, so it is read once. The compiler's kernels for such long rows take twice as long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton
from triton import jit

from digenrl.models.passes.fused_gelu import CUBIC, SLOPE
from digenrl.models.quantized.formats import FP8, FP8_LARGEST, SMALLEST_SCALE

WARPS = 8  # of a row; measured best of 4, 8, 16 and 32 for 12,288 channels


def gelu_rows(product_MN: Tensor, bias_N: Tensor, beside_MW: Tensor | None) -> tuple[Tensor, Tensor]:
    """[beside, GELU(product + bias)] in e4m3, (M, W + N), and the scale of each row."""
    beside = product_MN if beside_MW is None else beside_MW
    width = 0 if beside_MW is None else beside.shape[1]
    return _launched(product_MN, bias_N, product_MN, beside, width, backward=False)


def gelu_gradient_rows(gradient_MN: Tensor, product_MN: Tensor, bias_N: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the product in e4m3, and the scale of each row."""
    return _launched(product_MN, bias_N, gradient_MN, product_MN, width=0, backward=True)


def _launched(
    product_MN: Tensor, bias_N: Tensor, gradient_MN: Tensor, beside_MW: Tensor, width: int, *, backward: bool
) -> tuple[Tensor, Tensor]:
    rows, columns = product_MN.shape
    assert {each.stride(1) for each in (product_MN, gradient_MN, beside_MW)} == {1}, "rows are contiguous"
    values = torch.empty(rows, width + columns, device=product_MN.device, dtype=FP8)
    scales = torch.empty(rows, 1, device=product_MN.device)
    # Pieces have a length of a power of two; hidden widths are often three times one.
    pieces = 3 if columns == 3 * triton.next_power_of_2(triton.cdiv(columns, 3)) else 1
    wrap_triton(_rows)[(rows,)](
        product_MN,
        bias_N,
        gradient_MN,
        beside_MW,
        values,
        scales,
        product_MN.stride(0),
        gradient_MN.stride(0),
        beside_MW.stride(0),
        columns,
        width,
        PIECE=triton.next_power_of_2(triton.cdiv(columns, pieces)),
        PIECES=pieces,
        BESIDE=triton.next_power_of_2(width) if width else 0,
        BACKWARD=backward,
        SLOPE=SLOPE,
        CUBIC=CUBIC,
        LARGEST=FP8_LARGEST,
        SMALLEST=SMALLEST_SCALE,
        num_warps=WARPS,
    )
    return values, scales


@jit  # type: ignore[untyped-decorator]
def _piece(  # type: ignore[no-untyped-def]
    product,
    bias,
    gradient,
    column,
    columns,
    BACKWARD: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBIC: tl.constexpr,
):
    """Part of a row of GELU(product + bias), or of the gradient of the product."""
    inside = column < columns
    x = tl.load(product + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(SLOPE * (x + CUBIC * x * x * x))
    if BACKWARD:
        slope = gate + x * gate * (1 - gate) * SLOPE * (1 + 3 * CUBIC * x * x)
        x, gate = tl.load(gradient + column, mask=inside, other=0.0).to(tl.float32), slope
    return x * gate


@jit
def _store(values, column, columns, value, inverse):  # type: ignore[no-untyped-def]
    tl.store(values + column, (value * inverse).to(tl.float8e4nv), mask=column < columns)


@jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    product,
    bias,
    gradient,
    beside,
    values,
    scales,
    product_stride,
    gradient_stride,
    beside_stride,
    columns,
    width,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    BESIDE: tl.constexpr,
    BACKWARD: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBIC: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    product += row * product_stride
    gradient += row * gradient_stride
    values += row * (width + columns)
    column = tl.arange(0, PIECE)
    first = _piece(product, bias, gradient, column, columns, BACKWARD, SLOPE, CUBIC)
    largest = tl.max(tl.abs(first))
    if PIECES > 1:
        second = _piece(product, bias, gradient, column + PIECE, columns, BACKWARD, SLOPE, CUBIC)
        third = _piece(product, bias, gradient, column + 2 * PIECE, columns, BACKWARD, SLOPE, CUBIC)
        largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(second)), tl.max(tl.abs(third))))
    if BESIDE > 0:
        place = tl.arange(0, BESIDE)
        copied = tl.load(beside + row * beside_stride + place, mask=place < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(copied)))
    scale = tl.maximum(largest / LARGEST, SMALLEST)
    tl.store(scales + row, scale)
    inverse = 1.0 / scale
    if BESIDE > 0:
        _store(values, place, width, copied, inverse)
    _store(values + width, column, columns, first, inverse)
    if PIECES > 1:
        _store(values + width, column + PIECE, columns, second, inverse)
        _store(values + width, column + 2 * PIECE, columns, third, inverse)
