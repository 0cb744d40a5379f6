"""Prompts are encoded once, before the run; then the text encoders make room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from digenrl.models.contract import Conditioning, TextEncoder


class PromptCache:
    """The conditioning of every prompt of a run, one row each, kept on the CPU."""

    def __init__(self, rows: Mapping[str, Conditioning]) -> None:
        self._rows = dict(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, prompt: str) -> bool:
        return prompt in self._rows

    def row(self, prompt: str, device: torch.device | str = "cpu") -> Conditioning:
        """The conditioning of one prompt, one row, on this device."""
        if prompt not in self._rows:
            raise KeyError(
                f"prompt {prompt!r} was not encoded; {len(self)} prompts were: add it before the text encoders go"
            )
        return self._rows[prompt].to(device)


def encode_prompts(model: TextEncoder, prompts: Iterable[str], negative_prompt: str | None = None) -> PromptCache:
    """Encodes each distinct prompt once, then drops the model's text encoders.

    Without a negative prompt the family's own default holds; families with embedded guidance take none.

    One prompt at a time: a row's last bits depend on its batch, and a resumed run must see the embeddings of
    the run that was interrupted.
    """
    rows: dict[str, Conditioning] = {}
    negative: Mapping[str, Tensor | None] | None = None
    with torch.no_grad():
        for prompt in dict.fromkeys(prompts):
            row = model.encode([prompt], None if negative_prompt is None else [negative_prompt]).to("cpu")
            # The unconditional branch is the same for every prompt: one copy serves all rows.
            negative = row.negative if negative is None or not _same(negative, row.negative) else negative
            rows[prompt] = Conditioning(row.positive, negative)
    model.drop_text_encoders()
    return PromptCache(rows)


def _same(left: Mapping[str, Tensor | None], right: Mapping[str, Tensor | None] | None) -> bool:
    def equal(one: Tensor | None, other: Tensor | None) -> bool:
        return one is other if one is None or other is None else torch.equal(one, other)

    return right is not None and all(equal(left[name], right.get(name)) for name in left)
