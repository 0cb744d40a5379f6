"""A text encoder for models with random weights: random text arguments of the right shapes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from PIL import Image

from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.family import Family

TOKENS = 128  # of a prompt, in families that do not pad texts to a fixed length


class RandomTextEncoder:
    """Encodes a prompt, on the CPU, as random numbers that depend only on its text."""

    def __init__(
        self, family: Family, dtype: torch.dtype, size: str | None = None, text_tokens: int | None = None
    ) -> None:
        self._family, self._dtype, self._size, self._text_tokens = family, dtype, size, text_tokens

    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        negatives = [""] * len(prompts) if negative_prompts is None else negative_prompts
        rows = [self._row(prompt, negative) for prompt, negative in zip(prompts, negatives, strict=True)]
        return Conditioning.joined(rows)

    def encode_with_images(
        self,
        prompts: Sequence[str],
        images: Sequence[Sequence[Image.Image]],
        size: SampleSize,
        negative_prompts: Sequence[str] | None = None,
    ) -> Conditioning:
        """The images are random, too, and depend only on the pictures."""
        negatives = [""] * len(prompts) if negative_prompts is None else negative_prompts
        rows = []
        for prompt, sources, negative in zip(prompts, images, negatives, strict=True):
            seed = zlib.crc32(b"".join(image.tobytes() for image in sources))
            sizes = [SampleSize(image.height, image.width) for image in sources]
            encoded = self._family.random_images(sizes, size, self._dtype, seed, self._size)
            rows.append(replace(self._row(prompt, negative, len(sources)), images=encoded))
        return Conditioning.joined(rows)

    def drop_text_encoders(self) -> None:
        pass  # nothing is loaded

    def _row(self, prompt: str, negative: str, sources: int = 0) -> Conditioning:
        tokens = TOKENS + sources * self._family.model_class.vision_tokens
        positive = self._text(prompt, tokens).positive
        return Conditioning(
            positive, self._text(negative, tokens).positive if self._family.uses_negative_prompts else None
        )

    def _text(self, prompt: str, tokens: int) -> Conditioning:
        seed = zlib.crc32(prompt.encode())
        return self._family.random_conditioning(
            1, self._dtype, "cpu", seed, self._size, self._text_tokens, prompt_tokens=tokens
        )
