"""How the ranks of a context-parallel model divide tokens, and the collectives with which they exchange them.

Shape legend: P = tensors exchanged together, B = rows, H = heads, S = tokens, D = a head's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

Stream = Literal["image", "text"]


@dataclass(frozen=True, slots=True)
class TokenShares:
    """Which tokens of a forward each rank has: consecutive ones of each stream, as equally many as possible.

    A stream that is not divided counts no tokens.
    """

    rank: int
    ranks: int
    image: int
    text: int = 0

    def sizes(self, *streams: Stream) -> list[int]:
        """How many tokens of these streams together each rank has."""
        per_stream = [_equal_parts(self._length(stream), self.ranks) for stream in streams]
        return [sum(sizes) for sizes in zip(*per_stream, strict=True)]

    def own(self, value: Tensor, dim: int, *streams: Stream) -> Tensor:
        """This rank's part of a value with one entry per token, in which the streams follow each other."""
        pieces, first = [], 0
        for stream in streams:
            sizes = self.sizes(stream)
            pieces.append(value.narrow(dim, first + sum(sizes[: self.rank]), sizes[self.rank]))
            first += self._length(stream)
        assert first == value.shape[dim], f"{value.shape[dim]} tokens, expected {first}"
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def sizes_in_attention(self, tokens: int) -> list[int]:
        """The tokens of each rank in an attention with this many on this one: of both streams, or of the image."""
        together = self.sizes("image", "text")
        return together if together[self.rank] == tokens else self.sizes("image")

    def _length(self, stream: Stream) -> int:
        return self.image if stream == "image" else self.text


class TokenExchange:
    """One rank's connection to those with which it computes forwards together.

    `shares` are those of the forward that is being computed, or recomputed for a backward; `current` is None
    before the first one.
    """

    def __init__(self, rank: int, ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.ranks, self._group = rank, ranks, group
        self.current: TokenShares | None = None

    @property
    def shares(self) -> TokenShares:
        assert self.current is not None, "a forward has begun"
        return self.current

    def begin(self, image: int, text: int = 0) -> TokenShares:
        """Starts a forward with this many tokens of each stream."""
        self.current = TokenShares(self.rank, self.ranks, image, text)
        return self.current

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `context_fn` of a checkpoint: its recomputation has the shares of the forward that it repeats."""
        return nullcontext(), _Recomputation(self, self.current)

    def gather(self, own: Tensor, dim: int, *streams: Stream) -> Tensor:
        """The tokens of all ranks. In the backward, each rank takes the gradient of its own tokens.

        This is the gradient of one process if all ranks compute the same from the result.
        """
        gathered: Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
            own, dim, self.shares.sizes(*streams), self.rank, self._group
        )
        return gathered

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Attention between the tokens of all ranks: each computes it for some of the heads.

        Takes and returns this rank's tokens of all heads, (B, H, S, D). The mask is that of this rank's keys.
        """
        assert query.shape == key.shape == value.shape, "of self-attention"
        sizes = self.shares.sizes_in_attention(query.shape[2])
        if attn_mask is not None:
            assert attn_mask.shape[-2] == 1, "a mask of keys, the same for all queries"
            attn_mask = _gathered(attn_mask.to(torch.uint8), -1, sizes, self._group).bool()
        query, key, value = self._exchanged(torch.stack([query, key, value]), sizes, to_heads=True)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
        return self._exchanged(attended.unsqueeze(0), sizes, to_heads=False).squeeze(0)

    def _exchanged(self, value_PBHSD: Tensor, sizes: Sequence[int], to_heads: bool) -> Tensor:
        exchanged: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
            value_PBHSD, sizes, self.rank, self._group, to_heads
        )
        return exchanged


class _Recomputation(AbstractContextManager[None]):
    """Inside, an exchange has the shares of an earlier forward. Can be entered again: a graph may be kept."""

    def __init__(self, exchange: TokenExchange, shares: TokenShares | None) -> None:
        self._exchange, self._earlier = exchange, shares

    def __enter__(self) -> None:
        self._later, self._exchange.current = self._exchange.current, self._earlier

    def __exit__(self, *error: object) -> None:
        self._exchange.current = self._later


class _Exchange(torch.autograd.Function):
    """This rank's tokens of all heads for all tokens of its heads, or the other way round. Its own inverse."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup | None, to_heads: bool
    ) -> Tensor:
        ctx.arguments = (sizes, rank, group, not to_heads)
        return (_tokens_to_heads if to_heads else _heads_to_tokens)(value, sizes, rank, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sizes, rank, group, to_heads = ctx.arguments
        back = (_tokens_to_heads if to_heads else _heads_to_tokens)(gradient, sizes, rank, group)
        return back, None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, dim: int, sizes: Sequence[int], rank: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.own = (dim, sum(sizes[:rank]), sizes[rank])
        return _gathered(own, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.narrow(*ctx.own).contiguous(), None, None, None, None


def _tokens_to_heads(
    value_PBHSD: Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup | None
) -> Tensor:
    """(P, B, H, own S, D) to (P, B, H / ranks, all S, D)."""
    p, b, heads, own, d = value_PBHSD.shape
    h = heads // len(sizes)
    sent = value_PBHSD.reshape(p, b, len(sizes), h, own, d).movedim(2, 0).contiguous()
    each = p * b * h * d
    received = sent.new_empty(each * sum(sizes))
    dist.all_to_all_single(
        received, sent.view(-1), [each * size for size in sizes], [each * sizes[rank]] * len(sizes), group=group
    )
    pieces = torch.split(received, [each * size for size in sizes])
    return torch.cat([piece.view(p, b, h, size, d) for piece, size in zip(pieces, sizes, strict=True)], dim=3)


def _heads_to_tokens(
    value_PBHSD: Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup | None
) -> Tensor:
    """The inverse of `_tokens_to_heads`."""
    p, b, h, _, d = value_PBHSD.shape
    each = p * b * h * d
    sent = torch.cat([piece.reshape(-1) for piece in torch.split(value_PBHSD, list(sizes), dim=3)])
    received = sent.new_empty(len(sizes) * each * sizes[rank])
    dist.all_to_all_single(
        received, sent, [each * sizes[rank]] * len(sizes), [each * size for size in sizes], group=group
    )
    return received.view(len(sizes), p, b, h, sizes[rank], d).movedim(0, 2).flatten(2, 3)


def _gathered(own: Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """The values of all ranks in rank order. Shorter ones are padded on the way: collectives want equal sizes."""
    own = own.movedim(dim, 0)
    padding = own.new_zeros((max(sizes) - len(own), *own.shape[1:]))
    padded = torch.cat([own, padding])
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return torch.cat([each[:size] for each, size in zip(received, sizes, strict=True)]).movedim(0, dim)


def _equal_parts(total: int, parts: int) -> list[int]:
    """As equal as possible, the larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]
