"""FLUX's attention in an order that a compiler can fuse: text and image are rotated before they are joined.

Shape legend: B = rows, S = tokens of one stream, H = heads, D = a head's width, J = tokens of both streams.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from digenrl.models.families.parts.qwen_attention import in_heads, turned
from digenrl.models.passes.attention import AttentionProcessor

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
        own = tuple(table[text:] for table in image_rotary_emb)
        query, key, value = in_heads((attn.to_q, attn.to_k, attn.to_v), hidden_states, attn.head_dim)
        query, key = _rotated(attn.norm_q(query), own), _rotated(attn.norm_k(key), own)
        if encoder_hidden_states is None:
            return self._attended(query, key, value)
        layers = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
        text_query, text_key, text_value = in_heads(layers, encoder_hidden_states, attn.head_dim)
        before = tuple(table[:text] for table in image_rotary_emb)
        joint = self._attended(
            torch.cat([_rotated(attn.norm_added_q(text_query), before), query], dim=1),
            torch.cat([_rotated(attn.norm_added_k(text_key), before), key], dim=1),
            torch.cat([text_value, value], dim=1),
        )
        image_out = attn.to_out[0](joint[:, text:].contiguous())
        return attn.to_out[1](image_out), attn.to_add_out(joint[:, :text].contiguous())

    def _attended(self, query_BJHD: Tensor, key_BJHD: Tensor, value_BJHD: Tensor) -> Tensor:
        joint_BJHD = dispatch_attention_fn(query_BJHD, key_BJHD, value_BJHD, backend=self._attention_backend)
        joined: Tensor = joint_BJHD.flatten(2, 3).to(query_BJHD.dtype)
        return joined


def _rotated(value_BSHD: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    cosine, sine = (table[:, None].unflatten(-1, (-1, 2))[..., :1] for table in tables)  # type: ignore[no-untyped-call]
    return turned(value_BSHD, cosine, sine)
