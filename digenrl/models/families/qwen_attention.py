"""Qwen-Image's joint attention with rotary embeddings in real numbers, which a compiler can fuse.

diffusers uses complex numbers, for which compiled code falls back to separate kernels and fp32 copies.
Shape legend: B = rows, S = tokens of one stream, H = heads, D = a head's width, J = tokens of both streams.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

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


class JointAttention:
    """An attention processor: both streams attend to each other, text before image."""

    _attention_backend = None  # rollouts may set another kernel; see `digenrl.models.attention`
    _parallel_config = None

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
        image = _projected(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        text = _projected(attn, encoder_hidden_states, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        image_q, image_k = rotated(attn.norm_q(image[0]), image_table), rotated(attn.norm_k(image[1]), image_table)
        text_q = rotated(attn.norm_added_q(text[0]), text_table)
        text_k = rotated(attn.norm_added_k(text[1]), text_table)
        joint_BJHD = dispatch_attention_fn(
            torch.cat([text_q, image_q], dim=1),
            torch.cat([text_k, image_k], dim=1),
            torch.cat([text[2], image[2]], dim=1),
            attn_mask=joint_mask(encoder_hidden_states_mask, hidden_states.shape[1]),
            backend=self._attention_backend,
        )
        text_tokens = encoder_hidden_states.shape[1]
        joint = joint_BJHD.flatten(2, 3).to(hidden_states.dtype)
        image_out = attn.to_out[0](joint[:, text_tokens:].contiguous())
        return attn.to_out[1](image_out), attn.to_add_out(joint[:, :text_tokens].contiguous())


def rotated(value_BSHD: Tensor, table_SP2: Tensor) -> Tensor:
    """Rotates every pair of neighbouring channels, computed in fp32 (fp64 in an fp64 model).

    The table may also have a row for each row of the batch.
    """
    dtype = torch.promote_types(value_BSHD.dtype, torch.float32)
    first, second = value_BSHD.to(dtype).reshape(*value_BSHD.shape[:-1], -1, 2).unbind(-1)
    cosine, sine = table_SP2.unsqueeze(-3).unbind(-1)
    turned = torch.stack([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    return turned.flatten(-2).to(value_BSHD.dtype)


def _projected(attn: Any, states_BSW: Tensor, layers: tuple[nn.Module, ...]) -> list[Tensor]:
    width = attn.inner_dim // attn.heads
    return [layer(states_BSW).unflatten(-1, (-1, width)) for layer in layers]


def joint_mask(text_mask_BT: Tensor | None, image_tokens: int) -> Tensor | None:
    """The tokens that may be attended to, or None if no text is padded."""
    if text_mask_BT is None:
        return None
    image_mask_BS = text_mask_BT.new_ones((len(text_mask_BT), image_tokens), dtype=torch.bool)
    return torch.cat([text_mask_BT.to(torch.bool), image_mask_BS], dim=1)[:, None, None, :]
