"""Comparisons of results that should be equal bit for bit, as far as the CPU's matrix products allow."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def _rounds_alike() -> bool:
    """Whether a row's product has the same bits in any batch: not on AMD CPUs without AVX-512."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(8, 64, generator=generator), torch.randn(64, 64, generator=generator)
    return all(torch.equal(linear(rows[:count], weight), linear(rows, weight)[:count]) for count in (1, 2, 3))


ROUNDS_ALIKE = _rounds_alike()


def assert_same(left: Tensor, right: Tensor) -> None:
    """Bit for bit or, if this CPU rounds batches and layouts differently, up to rounding."""
    if ROUNDS_ALIKE:
        assert torch.equal(left, right)
    else:
        torch.testing.assert_close(left, right, atol=3e-5, rtol=1e-5)
