"""Rotary embeddings in real numbers, which a compiler can fuse.

Shape legend: B = rows, S = tokens, H = heads, D = a head's width, P = D / 2 pairs of channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(value_BSHD: Tensor, table_SP2: Tensor) -> Tensor:
    """Rotates every pair of neighboring channels, computed in fp32 (fp64 in an fp64 model).

    The table has the cosine and sine of every pair; it may also have a row for each row of the batch. Both ways
    below have the same result. Compiled without gradient, swapping is faster: the norm, the rotation and what
    follows become one kernel.
    """
    cosine, sine = table_SP2.unsqueeze(-3).split(1, dim=-1)  # type: ignore[no-untyped-call]
    dtype = torch.promote_types(value_BSHD.dtype, torch.float32)
    pairs = value_BSHD.to(dtype).unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled():
        first, second = pairs.split(1, dim=-1)
        result = torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    else:
        result = pairs * cosine + pairs.flip(-1) * torch.cat([-sine, sine], dim=-1)
    return result.flatten(-2).to(value_BSHD.dtype)
