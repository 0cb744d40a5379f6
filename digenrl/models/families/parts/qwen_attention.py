"""Qwen-Image's joint attention with rotary embeddings in real numbers, which a compiler can fuse.

diffusers uses complex numbers, for which compiled code falls back to separate kernels and fp32 copies.
Shape legend: B = rows, S = tokens of one stream, H = heads, D = a head's width, J = tokens of both streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from digenrl.models.adapters.lora import outputs_of
from digenrl.models.passes.attention import AttentionProcessor
from digenrl.models.passes.joined_heads import Stream, can_fuse, fused_heads
from digenrl.models.passes.rotation import rotated

Tables = tuple[Tensor, Tensor]  # for image and text: (S, D / 2, 2), the cosine and sine of every channel pair


class RealRotations(nn.Module):
    """Replaces the transformer's rotary embedding and returns the same tables in real numbers."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, *arguments: Any, **named: Any) -> Tables:
        """Cosines and sines for the image's and the text's tokens."""
        image, text = self.tables(*arguments, **named)
        return torch.view_as_real(image), torch.view_as_real(text)


class JointAttention(AttentionProcessor):
    """An attention processor: both streams attend to each other, text before image."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Tables | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The image's and the text's tokens, each after its own output layer."""
        assert attention_mask is None and image_rotary_emb is not None, "as this transformer calls it"
        image_table, text_table = image_rotary_emb
        width = attn.inner_dim // attn.heads
        text = Stream.of_text(attn, encoder_hidden_states, text_table)
        image = Stream.of_image(attn, hidden_states, image_table)
        joint_BJHD = dispatch_attention_fn(
            *joint_heads((text, image), width, self.fused),
            attn_mask=joint_mask(encoder_hidden_states_mask, hidden_states.shape[1]),
            backend=self._attention_backend,
        )
        text_tokens = encoder_hidden_states.shape[1]
        joint = joint_BJHD.flatten(2, 3).to(hidden_states.dtype)
        image_out = attn.to_out[0](joint[:, text_tokens:].contiguous())
        return attn.to_out[1](image_out), attn.to_add_out(joint[:, :text_tokens].contiguous())


def joint_heads(streams: Sequence[Stream], width: int, fused: bool) -> list[Tensor]:
    """Queries, keys and values of the streams one after the other, (B, J, H, D) each."""
    if fused and can_fuse(streams, width):
        return fused_heads(streams, width)
    heads = []
    for stream in streams:
        outputs = outputs_of(stream.layers, stream.states_BSW)
        query, key, value = [output.unflatten(-1, (-1, width)) for output in outputs]  # type: ignore[no-untyped-call]
        query, key = (
            rotated(norm(each), stream.table_SP2) for norm, each in zip(stream.norms, (query, key), strict=True)
        )
        heads.append((query, key, value))
    return [parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in zip(*heads, strict=True)]


def joint_mask(text_mask_BT: Tensor | None, image_tokens: int) -> Tensor | None:
    """The tokens that may be attended to, or None if no text is padded."""
    if text_mask_BT is None:
        return None
    image_mask_BS = text_mask_BT.new_ones((len(text_mask_BT), image_tokens), dtype=torch.bool)
    return torch.cat([text_mask_BT.to(torch.bool), image_mask_BS], dim=1)[:, None, None, :]
