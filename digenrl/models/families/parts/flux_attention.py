"""FLUX's attention in an order that a compiler can fuse: text and image are rotated before they are joined.

Shape legend: B = rows, S = tokens of one stream, H = heads, D = a head's width, J = tokens of both streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from digenrl.models.families.parts.qwen_attention import joint_heads
from digenrl.models.passes.attention import AttentionProcessor
from digenrl.models.passes.joined_heads import Stream

Tables = tuple[Tensor, Tensor]  # cosines and sines, (J, D): both channels of a pair have the same


class FluxAttention(AttentionProcessor):
    """An attention processor for both kinds of blocks: with a stream of text beside the image, and without."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Tables | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The tokens, or the image's and the text's tokens, each after its own output layer."""
        assert attention_mask is None and image_rotary_emb is not None, "as this transformer calls it"
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        table_JP2 = torch.stack([table[:, ::2] for table in image_rotary_emb], dim=-1)
        image = Stream.of_image(attn, hidden_states, table_JP2[text:])
        if encoder_hidden_states is None:
            return self._attended(attn, (image,))
        before = Stream.of_text(attn, encoder_hidden_states, table_JP2[:text])
        joint = self._attended(attn, (before, image))
        image_out = attn.to_out[0](joint[:, text:].contiguous())
        return attn.to_out[1](image_out), attn.to_add_out(joint[:, :text].contiguous())

    def _attended(self, attn: Any, streams: Sequence[Stream]) -> Tensor:
        query, key, value = joint_heads(streams, attn.head_dim, self.fused)
        joint_BJHD = dispatch_attention_fn(query, key, value, backend=self._attention_backend)
        joined: Tensor = joint_BJHD.flatten(2, 3).to(query.dtype)
        return joined
