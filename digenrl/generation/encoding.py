"""Encodes all prompts up front, so that the text encoders can be freed before the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from digenrl.models.contract import Conditioning, TextEncoder

AnyPrompt = TypeVar("AnyPrompt", bound=Hashable)


def encode_prompts(
    encoder: TextEncoder, prompts: Iterable[AnyPrompt], encode: Callable[[AnyPrompt], Conditioning]
) -> dict[AnyPrompt, Conditioning]:
    """Encodes each distinct prompt, one row each on the CPU, then drops the text encoders.

    `encode` returns the row of one prompt. Prompts are encoded one at a time: the last bits of a row depend on its
    batch, and a resumed run must see the embeddings of the run that was interrupted.
    """
    rows: dict[AnyPrompt, Conditioning] = {}
    negative: Mapping[str, Tensor | None] | None = None
    with torch.no_grad():
        for prompt in dict.fromkeys(prompts):
            row = encode(prompt).to("cpu")
            # The unconditional branch is mostly the same for every prompt: rows share one copy.
            negative = row.negative if negative is None or not _equal(negative, row.negative) else negative
            rows[prompt] = replace(row, negative=negative)
    encoder.drop_text_encoders()
    return rows


def _equal(left: Mapping[str, Tensor | None], right: Mapping[str, Tensor | None] | None) -> bool:
    def equal(one: Tensor | None, other: Tensor | None) -> bool:
        return one is other if one is None or other is None else torch.equal(one, other)

    return right is not None and all(equal(left[name], right.get(name)) for name in left)
