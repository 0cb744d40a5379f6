"""The codec `sampled`: few values stand for all, with the right expectation.

A value is sent with a probability in proportion to its magnitude, divided by that probability. The largest ones
are always sent, as they are. So what arrives is right on average, and gradients that are summed over many samples
keep their direction. `top_k` instead drops all small values every time. Which values are sent depends on the
values alone: one is taken wherever the running sum of probabilities passes a half. All sums are of integers, so
that a tensor is coded alike each time on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from digenrl.stages.codec_choice import SAMPLED_BLOCK

UNIT_BITS = 31  # magnitudes, in units of the largest one
PROBABILITY_BITS = 32


def encode_sampled(values: Tensor, entries: int) -> Tensor:
    """For each block of values how many were taken, then the values in bf16, then their indices within blocks."""
    flat = values.detach().reshape(-1).float()
    blocks = -(-flat.numel() // SAMPLED_BLOCK)
    counts = torch.zeros(blocks, dtype=torch.int32, device=flat.device)
    sent = torch.zeros(entries, dtype=torch.bfloat16, device=flat.device)
    places = torch.zeros(entries, dtype=torch.int16, device=flat.device)
    largest = flat.abs().amax() if flat.numel() else flat.new_zeros(())
    if not bool(largest.isfinite()):
        counts.fill_(-1)  # decodes to NaN: errors stay visible
    elif bool(largest > 0):
        chances = probabilities(flat.abs() / largest, min(entries, flat.numel()))
        half = 1 << (PROBABILITY_BITS - 1)
        passed = (chances.cumsum(0) + half) >> PROBABILITY_BITS
        taken = torch.diff(passed, prepend=passed.new_zeros(1)).nonzero()[:, 0][:entries]
        counts = torch.bincount(taken // SAMPLED_BLOCK, minlength=blocks).to(torch.int32)
        shares = chances[taken].double() / (1 << PROBABILITY_BITS)
        sent[: len(taken)] = (flat[taken] / shares).to(torch.bfloat16)
        places[: len(taken)] = (taken % SAMPLED_BLOCK - SAMPLED_BLOCK // 2).to(torch.int16)
    return torch.cat([part.view(torch.uint8) for part in (counts, sent, places)])


def decode_sampled(payload: Tensor, count: int, entries: int) -> Tensor:
    """All `count` values, zero where none was sent; raises ValueError if an index is not one of theirs."""
    blocks = -(-count // SAMPLED_BLOCK)
    counts, sent, places = (
        part.clone().view(dtype)  # copied, as views must be aligned
        for part, dtype in zip(
            torch.split(payload, [4 * blocks, 2 * entries, 2 * entries]),
            (torch.int32, torch.bfloat16, torch.int16),
            strict=True,
        )
    )
    whole = torch.zeros(count, device=payload.device)
    if bool((counts < 0).any()):
        return whole.fill_(float("nan"))
    taken = int(counts.sum())
    block = torch.repeat_interleave(torch.arange(blocks, device=payload.device), counts.long())
    indices = block * SAMPLED_BLOCK + places[:taken].long() + SAMPLED_BLOCK // 2 if taken <= entries else None
    if indices is None or bool((indices >= count).any()):
        raise ValueError(f"damaged: an index of sampled is outside of {count} values")
    whole[indices] = sent[:taken].float()
    return whole


def probabilities(relative: Tensor, taken: int) -> Tensor:
    """Of each value to be taken, as integers: min(1, c * magnitude) with the c for which their sum is `taken`.

    `relative` are magnitudes in units of the largest one.
    """
    units = (relative.double() * (1 << UNIT_BITS)).round().long()
    largest = units.topk(taken).values
    left = taken - torch.arange(taken, device=units.device)
    remaining = units.sum() - largest.cumsum(0) + largest  # each and all smaller ones
    certain = (largest * left >= remaining).long().cumprod(0).sum().clamp(max=taken - 1)
    per_unit = left[certain].double() / remaining[certain].clamp(min=1)  # 0 if all values that are left are 0
    return (units * per_unit).clamp(max=1).mul(1 << PROBABILITY_BITS).round().long()
