"""What one forward computes: its operations, and its attention calls with their shapes and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from digenrl.models.passes.attention import AttentionCalls


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Equal attention calls of a forward; `mask` is broadcast over heads and queries, True where keys are seen."""

    rows: int
    heads: int
    queries: int
    keys: int
    width: int  # of a head
    dtype: torch.dtype
    mask: Tensor | None = None
    count: int = 1

    @property
    def flop(self) -> float:
        """Operations of the forward of all calls."""
        return 4.0 * self.count * self.rows * self.heads * self.queries * self.keys * self.width


@dataclass(frozen=True, slots=True)
class ForwardRecord:
    """The operations of matrix products and attention in a forward, and its attention calls."""

    flop: float
    attention: tuple[AttentionCall, ...]


def record_forward(forward: Callable[[], object]) -> ForwardRecord:
    """Runs a forward eagerly and without gradient."""
    calls = _CountedCalls()
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        FlopCounterMode(display=False) as counter,
        calls,
    ):
        forward()
    return ForwardRecord(float(counter.get_total_flops()), tuple(calls.found.values()))


class _CountedCalls(AttentionCalls):
    """Collects calls of torch's attention, with equal ones counted."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[Any, ...], AttentionCall] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *further: Any, **named: Any) -> Tensor:
        attn_mask: Tensor | None = named.get("attn_mask", further[0] if further else None)
        rows, heads, queries, width = query.shape
        known = (query.shape, key.shape, query.dtype, attn_mask is not None)
        call = self.found.get(known)
        if call is None:
            mask = None if attn_mask is None else attn_mask.detach().cpu()
            call = AttentionCall(rows, heads, queries, key.shape[2], width, query.dtype, mask, count=0)
        self.found[known] = replace(call, count=call.count + 1)
        return super().attend(query, key, value, *further, **named)
