"""The formats of quantized weights in plain torch, so that they are the same on every device.

| format | values | scale |
|---|---|---|
| nf4 | the 16 levels of QLoRA's NormalFloat, two per byte | bf16, one per block of 64 consecutive weights |
| int8 | -127 to 127 | fp32, one per row |
| fp8 | e4m3 | fp32, one per row |

Shape legend: N = outputs, K = inputs, M = rows of an activation, P = blocks.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from digenrl.config.recipes.base_precision import NF4_BLOCK

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (arXiv 2305.14314, appendix E).
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
INT8_LARGEST = 127.0
FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
SMALLEST_SCALE = 1e-12  # of a row of zeros


@cache
def nf4_pairs(device: torch.device) -> Tensor:
    """The two levels of each byte, (256, 2). Copied to a device once: each copy would wait for the device."""
    levels = torch.tensor(NF4_LEVELS)
    return torch.cartesian_prod(levels, levels).to(device)


def quantize_nf4(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Packed levels, the first weight of a pair in the high half of its byte, and the scales of the blocks.

    The last block is padded with zeros.
    """
    flat = weight_NK.detach().flatten().float()
    blocks_PB = pad(flat, (0, -len(flat) % NF4_BLOCK)).view(-1, NF4_BLOCK)
    scale_P = blocks_PB.abs().amax(dim=1).to(torch.bfloat16)
    levels = torch.tensor(NF4_LEVELS, device=flat.device)
    relative_PB = blocks_PB / scale_P.float().clamp_min(SMALLEST_SCALE)[:, None]
    index_PB = torch.bucketize(relative_PB, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    high, low = index_PB.view(-1, 2).unbind(1)
    return (high << 4) | low, scale_P


def dequantize_nf4(
    packed: Tensor, scale_P: Tensor, pairs: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The weights (N, K) of packed levels; `pairs` are `nf4_pairs`."""
    values_PB = embedding(packed.int(), pairs).view(-1, NF4_BLOCK) * scale_P.float()[:, None]
    return values_PB.to(dtype).flatten()[: shape[0] * shape[1]].view(shape)


def quantize_int8(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers and the scale of each row, (N, 1)."""
    weight_NK = weight_NK.detach().float()
    scale_N1 = (weight_NK.abs().amax(dim=1, keepdim=True) / INT8_LARGEST).clamp_min(SMALLEST_SCALE)
    return (weight_NK / scale_N1).round().to(torch.int8), scale_N1


def quantize_fp8(value_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Values in e4m3 and the scale of each row, (M, 1); of weights or of activations."""
    value_MK = value_MK.detach().float()
    scale_M1 = (value_MK.abs().amax(dim=1, keepdim=True) / FP8_LARGEST).clamp_min(SMALLEST_SCALE)
    return (value_MK / scale_M1).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8), scale_M1


def dequantize_rows(values_NK: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of int8 or fp8 values."""
    return (values_NK.float() * scale_N1).to(dtype)
