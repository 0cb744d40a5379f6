"""The demo pipeline before training: every component of Stable Diffusion 3, as small as the task allows."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from digenrl.testing.tiny_models import seeded_weights
from digenrl.testing.tiny_text_encoders import tiny_clip_tokenizer, tiny_t5_tokenizer

WORDS = ("a", "sign", "that", "says")  # one token each; everything else is spelled
TEXT_LENGTH = 12  # tokens: these words, two quotes, four digits, start and end
TEXT_WIDTH = 64
HIDDEN, HEADS, LAYERS = 96, 4, 4
VAE_CHANNELS = 16
SHIFT = 2.0  # of the noise schedule


def untrained_pipeline(seed: int) -> StableDiffusion3Pipeline:
    """All components with random weights. The text encoders are not trained: see `small_text_encoder`."""
    with seeded_weights(seed):
        clip_tokenizer = tiny_clip_tokenizer(WORDS, TEXT_LENGTH)
        t5_tokenizer = tiny_t5_tokenizer((*WORDS, '"'), TEXT_LENGTH)
        return StableDiffusion3Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
            vae=small_vae(),
            text_encoder=small_text_encoder(clip_tokenizer),
            tokenizer=clip_tokenizer,
            text_encoder_2=small_text_encoder(clip_tokenizer),
            tokenizer_2=clip_tokenizer,
            text_encoder_3=small_t5(t5_tokenizer),
            tokenizer_3=t5_tokenizer,
        )


def _transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=LAYERS,
        attention_head_dim=HIDDEN // HEADS,
        num_attention_heads=HEADS,
        caption_projection_dim=HIDDEN,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )


def small_vae() -> AutoencoderKL:
    """16 latent channels and 8 pixels per latent, as SD3 has. One residual block per level trains in minutes."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(VAE_CHANNELS,) * 4,
        layers_per_block=0,
        norm_num_groups=4,
        latent_channels=16,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def small_text_encoder(tokenizer: Any) -> CLIPTextModelWithProjection:
    """A CLIP with one layer, of which the pipeline uses the sum of token and position embeddings.

    Both are random and of the same magnitude, so every digit and its position can be told apart without training.
    """
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH // 2,
        intermediate_size=TEXT_WIDTH,
        projection_dim=TEXT_WIDTH // 2,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModelWithProjection(config).eval()
    for module in encoder.modules():
        if isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.7)
    return encoder


def small_t5(tokenizer: Any) -> T5EncoderModel:
    """A T5 with one layer, of random weights."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=TEXT_WIDTH // 2,
        d_ff=TEXT_WIDTH,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config).eval()  # eval: T5 has dropout
