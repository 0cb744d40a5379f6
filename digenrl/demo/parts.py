"""The demo pipeline before any training: every part that Stable Diffusion 3 has, as small as the task allows."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import pre_tokenizers
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from digenrl.models.tiny import CHARACTERS, END_OF_WORD, seeded_weights

WORDS = ("a", "sign", "that", "says")  # one token each; everything else is spelt
TEXT_LENGTH = 12  # tokens: these words, two quotes, four digits and the marks around them
TEXT_WIDTH = 64
HIDDEN, HEADS, LAYERS = 96, 4, 4
VAE_CHANNELS = 16
SHIFT = 2.0  # of the noise schedule


def untrained_pipeline(seed: int) -> StableDiffusion3Pipeline:
    """All parts with random weights. The text encoders stay as they are here: see `_text_encoder`."""
    with seeded_weights(seed):
        clip_tokenizer, t5_tokenizer = _clip_tokenizer(), _t5_tokenizer()
        return StableDiffusion3Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
            vae=_vae(),
            text_encoder=_text_encoder(clip_tokenizer),
            tokenizer=clip_tokenizer,
            text_encoder_2=_text_encoder(clip_tokenizer),
            tokenizer_2=clip_tokenizer,
            text_encoder_3=_t5(t5_tokenizer),
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


def _vae() -> AutoencoderKL:
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


def _clip_tokenizer() -> Any:
    """CLIP splits every text into words and single digits; here, words it does not know are spelt byte by byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        left, *others = [*word[:-1], word[-1] + END_OF_WORD]
        for right in others:
            merges[left, right] = None
            left += right
    tokens = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(byte + END_OF_WORD for byte in alphabet)]
    tokens += [left + right for left, right in merges]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=list(merges), model_max_length=TEXT_LENGTH)


def _t5_tokenizer() -> Any:
    """Words it knows are one piece, and so is every other character."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(f"▁{word}", -4.0) for word in (*WORDS, '"')]
    characters = [(character, -8.0) for character in ("▁", *CHARACTERS)]
    return T5TokenizerFast(vocab=special + words + characters, extra_ids=0, model_max_length=TEXT_LENGTH)


def _text_encoder(tokenizer: Any) -> CLIPTextModelWithProjection:
    """A CLIP of one layer: what the pipeline takes from it is the sum of token and position embedding.

    These are random and as large as each other, so that every digit and its place can be told apart: there is
    nothing left to learn.
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


def _t5(tokenizer: Any) -> T5EncoderModel:
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
