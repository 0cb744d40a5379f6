"""What one forward computes: its operations, and its attention calls with their shapes and masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode


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
    calls = _AttentionCalls()
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        FlopCounterMode(display=False) as counter,
        calls,
    ):
        forward()
    return ForwardRecord(float(counter.get_total_flops()), tuple(calls.found.values()))


class _AttentionCalls(TorchFunctionMode):
    """Collects calls of torch's attention, with equal ones counted."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[Any, ...], AttentionCall] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            self._add(**(dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs))
        return func(*args, **kwargs)

    def _add(self, query: Tensor, key: Tensor, attn_mask: Tensor | None = None, **_: Any) -> None:
        rows, heads, queries, width = query.shape
        known = (query.shape, key.shape, query.dtype, attn_mask is not None)
        call = self.found.get(known)
        if call is None:
            mask = None if attn_mask is None else attn_mask.detach().cpu()
            call = AttentionCall(rows, heads, queries, key.shape[2], width, query.dtype, mask, count=0)
        self.found[known] = replace(call, count=call.count + 1)
