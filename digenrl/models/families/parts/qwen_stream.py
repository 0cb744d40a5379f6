"""Qwen-Image 2.1's forward from text, and its pipeline without a processor of videos.

diffusers counts padding as text: beside a longer prompt, the image's tokens are at other positions. Here every row
has the positions that it has alone. Rotations are in real numbers, which a compiler can fuse.
Shape legend: B = rows, T = text tokens, S = image tokens, J = T + S, H = heads, D = width, P = pairs of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn
from transformers import BatchEncoding

from digenrl.models.families.parts.qwen_attention import joint_mask
from digenrl.models.passes.attention import AttentionProcessor
from digenrl.models.passes.rotation import rotated


class TextProcessor:
    """Qwen3-VL's processor, for texts alone."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: Sequence[str], **settings: Any) -> BatchEncoding:
        encoded: BatchEncoding = self.tokenizer(list(text), **settings)
        return encoded


class NoProcessor:
    """A stand-in with the methods that the pipeline's constructor calls on its processor."""

    tokenizer: Any

    def __init__(self) -> None:
        self.tokenizer = self

    def apply_chat_template(self, _messages: Any, **_settings: Any) -> list[list[int]]:
        return [[]]

    def encode(self, _text: str) -> list[int]:
        return [0]


class QwenImage21Pipeline(diffusers.QwenImage21Pipeline):  # type: ignore[misc]
    """diffusers' pipeline, with a tokenizer as its processor, or none: that of videos would need torchvision."""

    @wraps(diffusers.QwenImage21Pipeline.__init__)  # type: ignore[misc]
    def __init__(self, **parts: Any) -> None:
        super().__init__(**{**parts, "processor": NoProcessor()})
        self.register_modules(processor=parts["processor"])


class RowPositions(nn.Module):
    """Replaces the transformer's rotary embedding."""

    def __init__(self, tables: Sequence[Tensor]) -> None:
        super().__init__()
        self.tables = [
            torch.view_as_real(table) for table in tables
        ]  # of frames, rows and columns: (positions, P, 2)

    def forward(self, text: int, length_B: Tensor, height: int, width: int) -> Tensor:
        """(B, J, P, 2): text is at 0, 1, ... on all axes, and the image around 0, after the text of its row."""
        device = length_B.device
        self.tables = [table.to(device) for table in self.tables]
        frames, rows, columns = self.tables
        text_TP2 = torch.cat([table[:text] for table in self.tables], dim=1)
        down = torch.arange(-(height - height // 2), height // 2, device=device).repeat_interleave(width)
        across = torch.arange(-(width - width // 2), width // 2, device=device).repeat(height)
        within_SP2 = torch.cat([rows[down], columns[across]], dim=1)
        after_BSP2 = frames[length_B][:, None].expand(-1, height * width, -1, -1)
        image_BSP2 = torch.cat([after_BSP2, within_SP2.expand(len(length_B), -1, -1, -1)], dim=2)
        return torch.cat([text_TP2.expand(len(length_B), -1, -1, -1), image_BSP2], dim=1)


class TextThenImage(AttentionProcessor):
    """An attention processor: text attends to the text before it, and the image to everything."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        *,
        rotary_emb: Tensor,
        segments: int,
        key_valid: Tensor | None,
        **_unused: Any,
    ) -> Tensor:
        """All tokens after the output layer. `segments` is the number of image tokens, `key_valid` masks text."""
        query, key, value = (
            layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = rotated(attn.norm_q(query), rotary_emb), rotated(attn.norm_k(key), rotary_emb)
        text = hidden_states.shape[1] - segments
        text_BTHD = dispatch_attention_fn(
            query[:, :text], key[:, :text], value[:, :text], is_causal=True, backend=self._attention_backend
        )
        image_BSHD = dispatch_attention_fn(
            query[:, text:],
            key,
            value,
            attn_mask=joint_mask(key_valid, segments),
            backend=self._attention_backend,
        )
        joint_BJHD = torch.cat([text_BTHD, image_BSHD], dim=1)
        output: Tensor = attn.to_out[0](joint_BJHD.flatten(2, 3).to(hidden_states.dtype))
        return output


def stream_forward(
    transformer: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    grid: tuple[int, int],
) -> tuple[Tensor]:
    """The velocity of the image; text is modulated as at time 0. Replaces the transformer's own forward."""
    image_BSD, text_BTD = transformer.img_in(hidden_states), transformer.txt_in(encoder_hidden_states)
    rows, text, tokens, mask_BT = len(text_BTD), text_BTD.shape[1], image_BSD.shape[1], encoder_hidden_states_mask
    length_B = torch.full((rows,), text, device=text_BTD.device) if mask_BT is None else mask_BT.sum(dim=1).long()
    rotary_BJP2 = transformer.pos_embed(text, length_B, *grid)
    is_image_J = torch.arange(text + tokens, device=text_BTD.device) >= text
    times = torch.cat([timestep, timestep.new_zeros(1)])
    time_BD = transformer.time_text_embed(times, image_BSD)
    modulation = transformer.modulation(time_BD)
    joint_BJD = torch.cat([text_BTD, image_BSD], dim=1)
    checkpointed = torch.is_grad_enabled() and transformer.gradient_checkpointing
    for block in transformer.transformer_blocks:
        arguments = (joint_BJD, modulation, rotary_BJP2, None, is_image_J, None, None, None, tokens, mask_BT)
        run = transformer._gradient_checkpointing_func
        joint_BJD = run(block, *arguments) if checkpointed else block(*arguments)
    return (transformer.proj_out(transformer.norm_out(joint_BJD[:, text:], time_BD[:-1])),)
