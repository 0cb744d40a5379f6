"""Tiny pipelines of Wan's other sizes: two transformers, another VAE, or an image encoder."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from transformers import CLIPImageProcessorPil

from digenrl.models.families import wan, wan_i2v
from digenrl.testing.tiny_video_models import tiny_wan, tiny_wan_i2v
from digenrl.testing.tiny_vision_encoders import tiny_clip_vision


def tiny_wan_a14b() -> WanPipeline:
    """Wan2.2 A14B: a second transformer with other weights, for low noise levels."""
    pipeline = tiny_wan()
    second = WanTransformer3DModel.from_config(pipeline.transformer.config)
    return WanPipeline(**{**pipeline.components, "transformer_2": second}, **wan.SETTINGS_A14B)


def tiny_wan_2_2() -> WanPipeline:
    """Wan2.2 5B: another VAE, 48 latent channels and 16 pixels per latent, and a timestep per token."""
    parts = tiny_wan().components
    vae = {**wan.VAE_2_2.arguments, "base_dim": 4, "decoder_base_dim": 4, "dim_mult": [1, 2, 2, 2]}
    own = {
        "transformer": WanTransformer3DModel.from_config(
            parts["transformer"].config, in_channels=48, out_channels=48
        ),
        "scheduler": wan.SCHEDULER_2_2.build(),
        "vae": AutoencoderKLWan(**vae, num_res_blocks=1),
    }
    return WanPipeline(**{**parts, **own}, **wan.SETTINGS_2_2)


def tiny_wan_i2v_a14b() -> WanImageToVideoPipeline:
    """Wan2.2 A14B from images: a second transformer, for low noise levels."""
    parts = tiny_wan_i2v().components
    second = WanTransformer3DModel.from_config(parts["transformer"].config)
    return WanImageToVideoPipeline(**{**parts, "transformer_2": second}, **wan_i2v.SETTINGS_A14B)


def tiny_wan_i2v_2_1(*, last_frame: bool) -> WanImageToVideoPipeline:
    """Wan2.1 from the first frame, or from the first and the last, with an image encoder of 5 tokens per image."""
    parts = tiny_wan_i2v().components
    shape = {"image_dim": 8, "added_kv_proj_dim": 32, "pos_embed_seq_len": 2 * 5 if last_frame else None}
    transformer = WanTransformer3DModel.from_config(parts["transformer"].config, **shape)
    if last_frame:
        torch.nn.init.normal_(transformer.condition_embedder.image_embedder.pos_embed)
    vision = {
        "image_encoder": tiny_clip_vision(width=8, image_size=16, patch_size=8),
        "image_processor": CLIPImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
    }
    return WanImageToVideoPipeline(**{**parts, **vision, "transformer": transformer})
