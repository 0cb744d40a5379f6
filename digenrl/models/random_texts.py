"""Stands in for text encoders where a model has random weights: texts of the right shapes, by their prompts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from digenrl.models.contract import Conditioning
from digenrl.models.family import Family

TOKENS = 128  # of a prompt, in families that do not pad texts to a fixed length


class RandomTexts:
    """Encodes a prompt as random numbers that depend on it alone; empty negative prompts all have the same."""

    def __init__(self, family: Family, dtype: torch.dtype, size: str | None = None) -> None:
        self._family, self._dtype, self._size = family, dtype, size

    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        """On the CPU."""
        negatives = [""] * len(prompts) if negative_prompts is None else negative_prompts
        rows = [self._row(prompt, negative) for prompt, negative in zip(prompts, negatives, strict=True)]
        return Conditioning.joined(rows)

    def drop_text_encoders(self) -> None:
        """There are none."""

    def _row(self, prompt: str, negative: str) -> Conditioning:
        positive = self._texts(prompt)
        if not self._family.uses_negative_prompts:
            return Conditioning(positive.positive)
        return Conditioning(positive.positive, self._texts(negative).positive)

    def _texts(self, prompt: str) -> Conditioning:
        seed = zlib.crc32(prompt.encode())
        return self._family.random_conditioning(1, self._dtype, "cpu", seed, self._size, text_tokens=TOKENS)
