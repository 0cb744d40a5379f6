"""Encodes all prompts up front, so that the text encoders can be freed before the model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from digenrl.models.contract import Conditioning, TextEncoder


def encode_prompts(
    encoder: TextEncoder, prompts: Iterable[str], negative_prompt: str | None = None
) -> dict[str, Conditioning]:
    """Encodes each distinct prompt, one row each on the CPU, then drops the text encoders.

    Without a negative prompt the family's default applies; families with embedded guidance take none. Prompts are
    encoded one at a time: the last bits of a row depend on its batch, and a resumed run must see the embeddings of
    the run that was interrupted.
    """
    rows: dict[str, Conditioning] = {}
    negative: Mapping[str, Tensor | None] | None = None
    with torch.no_grad():
        for prompt in dict.fromkeys(prompts):
            row = encoder.encode([prompt], None if negative_prompt is None else [negative_prompt]).to("cpu")
            # The unconditional branch is the same for every prompt: all rows share one copy.
            negative = row.negative if negative is None or not _equal(negative, row.negative) else negative
            rows[prompt] = Conditioning(row.positive, negative)
    encoder.drop_text_encoders()
    return rows


def _equal(left: Mapping[str, Tensor | None], right: Mapping[str, Tensor | None] | None) -> bool:
    def equal(one: Tensor | None, other: Tensor | None) -> bool:
        return one is other if one is None or other is None else torch.equal(one, other)

    return right is not None and all(equal(left[name], right.get(name)) for name in left)
