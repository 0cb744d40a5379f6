"""HunyuanVideo 1.5's forward with static shapes, and without tokens of an image that is not there.

diffusers sorts the tokens of every row by their masks on the host, and always has a token for each of 729 parts of
an image. The order of text tokens does not matter: they have no positions.
Shape legend: B = rows, S = tokens of one stream, T = text tokens, H = heads, D = width.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn
from torch.nn.functional import pad

from digenrl.models.passes.attention import AttentionProcessor


def video_forward(
    transformer: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor | None = None,
    glyphs: Tensor | None = None,
    image_embeds: Tensor | None = None,
) -> tuple[Tensor]:
    """The velocity; the mask is None if no text is padded. Replaces the transformer's own forward.

    `glyphs`, (B, T, 1), is True for a glyph, and None if all tokens are words. `image_embeds` are the tokens of a
    source image, as many in every row.
    """
    rotary, time_BD = transformer.rope(hidden_states), transformer.time_embed(timestep)
    mask_BT = None if encoder_attention_mask is None else encoder_attention_mask > 0
    glyphs_BT = None if glyphs is None else glyphs[..., 0] > 0
    text_BTD = embedded_text(transformer, timestep, encoder_hidden_states, mask_BT, glyphs_BT)
    if image_embeds is not None:
        image_BTD = transformer.image_embedder(image_embeds) + transformer.cond_type_embed.weight[2]
        text_BTD = torch.cat([image_BTD, text_BTD], dim=1)
        mask_BT = None if mask_BT is None else pad(mask_BT, (image_BTD.shape[1], 0), value=True)
    frames, height, width = hidden_states.shape[2:]
    states_BSD = transformer.x_embedder(hidden_states)
    checkpointed = torch.is_grad_enabled() and transformer.gradient_checkpointing
    for block in transformer.transformer_blocks:
        arguments = (states_BSD, text_BTD, time_BD, mask_BT, rotary)
        run = transformer._gradient_checkpointing_func
        states_BSD, text_BTD = run(block, *arguments) if checkpointed else block(*arguments)
    output_BSC = transformer.proj_out(transformer.norm_out(states_BSD, time_BD))
    return (output_BSC.transpose(1, 2).unflatten(2, (frames, height, width)),)


def embedded_text(
    transformer: Any, timestep: Tensor, text_BTD: Tensor, mask_BT: Tensor | None, glyphs_BT: Tensor | None
) -> Tensor:
    """The tokens of words and glyphs, each through its own layers; padding is 0."""
    word_type, glyph_type = transformer.cond_type_embed.weight[0], transformer.cond_type_embed.weight[1]
    is_word_BT = mask_BT
    if glyphs_BT is not None:
        is_word_BT = ~glyphs_BT if mask_BT is None else mask_BT & ~glyphs_BT
    embedded_BTD: Tensor = transformer.context_embedder(text_BTD, timestep, is_word_BT) + word_type
    if glyphs_BT is not None:
        width = transformer.context_embedder_2.norm.normalized_shape[0]
        glyphs_BTD = transformer.context_embedder_2(text_BTD[..., :width]) + glyph_type
        embedded_BTD = torch.where(glyphs_BT[..., None], glyphs_BTD, embedded_BTD)
    return embedded_BTD if mask_BT is None else embedded_BTD.masked_fill(~mask_BT[..., None], 0)


def refine_words(
    refiner: Any, hidden_states: Tensor, temb: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """All tokens attend to the words. Replaces the forward of the text's refiner.

    With diffusers' own, tokens that are not words attend to nothing. Some kernels return NaN for them, which
    reaches gradients although these states are not used.
    """
    mask_B11T = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
    for block in refiner.refiner_blocks:
        hidden_states = block(hidden_states, temb, mask_B11T)
    return hidden_states


class VideoThenText(AttentionProcessor):
    """An attention processor: both streams attend to each other, except for padding of the text."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """The video's and the text's tokens, each after its own output layer."""
        video_q, video_k, video_v = _projected(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        text_q, text_k, text_v = _projected(
            attn, encoder_hidden_states, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        )
        video_q, video_k = (
            apply_rotary_emb(each, image_rotary_emb, sequence_dim=1)
            for each in (attn.norm_q(video_q), attn.norm_k(video_k))
        )
        tokens = hidden_states.shape[1]
        mask = None if attention_mask is None else pad(attention_mask, (tokens, 0), value=True)[:, None, None, :]
        joint_BSHD = dispatch_attention_fn(
            torch.cat([video_q, attn.norm_added_q(text_q)], dim=1),
            torch.cat([video_k, attn.norm_added_k(text_k)], dim=1),
            torch.cat([video_v, text_v], dim=1),
            attn_mask=mask,
            backend=self._attention_backend,
        )
        joint_BSD = joint_BSHD.flatten(2, 3).to(hidden_states.dtype)
        video_BSD = attn.to_out[0](joint_BSD[:, :tokens].contiguous())
        return attn.to_out[1](video_BSD), attn.to_add_out(joint_BSD[:, tokens:].contiguous())


def _projected(attn: Any, states_BSD: Tensor, layers: tuple[nn.Module, ...]) -> list[Tensor]:
    return [layer(states_BSD).unflatten(2, (attn.heads, -1)) for layer in layers]
