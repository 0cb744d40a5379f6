"""A tiny diffusers pipeline of every video family: all components of the real one, random weights.

A builder takes a tokenizer of each kind, tiny ones by default.
"""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLWan,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import ByT5Tokenizer, SiglipImageProcessorPil

from digenrl.models.families import hunyuan_video, hunyuan_video_1_5, ltx2, wan
from digenrl.testing.tiny_text_encoders import (
    HUNYUAN_VIDEO_1_5_TEMPLATE,
    tiny_byt5,
    tiny_chat_tokenizer,
    tiny_clip,
    tiny_clip_tokenizer,
    tiny_llama,
    tiny_llama_tokenizer,
    tiny_t5_tokenizer,
    tiny_umt5,
)
from digenrl.testing.tiny_vision_encoders import tiny_gemma3, tiny_qwen_text_encoder, tiny_siglip_vision


def tiny_wan(tokenizer: Any = None) -> WanPipeline:
    tokenizer = tokenizer or tiny_t5_tokenizer()
    return WanPipeline(
        transformer=WanTransformer3DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            text_dim=16,
            freq_dim=32,
            ffn_dim=64,
            rope_max_seq_len=64,
        ),
        scheduler=wan.SCHEDULER.build(),
        vae=AutoencoderKLWan(base_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1),
        text_encoder=tiny_umt5(tokenizer, width=16),
        tokenizer=tokenizer,
    )


def tiny_wan_i2v(tokenizer: Any = None) -> WanImageToVideoPipeline:
    """As Wan2.2 A14B from images, without an image encoder, but with one transformer."""
    parts = tiny_wan(tokenizer).components
    transformer = WanTransformer3DModel.from_config(parts["transformer"].config, in_channels=36)
    return WanImageToVideoPipeline(**{**parts, "transformer": transformer})


def tiny_hunyuan_video(tokenizer: Any = None, clip_tokenizer: Any = None) -> HunyuanVideoPipeline:
    tokenizer = tokenizer or tiny_llama_tokenizer()
    # The pipeline pads to 77 tokens, whatever the tokenizer says.
    clip_tokenizer = clip_tokenizer or tiny_clip_tokenizer(length=77)
    return HunyuanVideoPipeline(
        transformer=HunyuanVideoTransformer3DModel(
            num_layers=1,
            num_single_layers=2,
            num_refiner_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=16,
            pooled_projection_dim=16,
            rope_axes_dim=(4, 6, 6),
        ),
        scheduler=hunyuan_video.SCHEDULER.build(),
        vae=AutoencoderKLHunyuanVideo(block_out_channels=(4, 8, 8, 8), layers_per_block=1, norm_num_groups=4),
        text_encoder=tiny_llama(tokenizer, width=16),
        tokenizer=tokenizer,
        text_encoder_2=tiny_clip(clip_tokenizer, width=16),
        tokenizer_2=clip_tokenizer,
    )


def tiny_hunyuan_video_1_5(tokenizer: Any = None) -> HunyuanVideo15Pipeline:
    """HunyuanVideo 1.5 from text."""
    tokenizer = tokenizer or tiny_chat_tokenizer(HUNYUAN_VIDEO_1_5_TEMPLATE)
    return HunyuanVideo15Pipeline(
        transformer=HunyuanVideo15Transformer3DModel(
            num_layers=2,
            num_refiner_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=16,
            text_embed_2_dim=8,
            image_embed_dim=8,
            rope_axes_dim=(4, 6, 6),
            task_type="t2v",
        ),
        scheduler=hunyuan_video_1_5.SCHEDULER.build(),
        vae=AutoencoderKLHunyuanVideo15(block_out_channels=(4, 4, 8, 32, 64), layers_per_block=1),
        text_encoder=tiny_qwen_text_encoder(tokenizer, width=16, layers=3).model.language_model,
        tokenizer=tokenizer,
        text_encoder_2=tiny_byt5(width=8),
        tokenizer_2=ByT5Tokenizer(extra_ids=0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )


def tiny_hunyuan_video_1_5_i2v(tokenizer: Any = None) -> HunyuanVideo15ImageToVideoPipeline:
    """HunyuanVideo 1.5 from images, with an image encoder of 4 tokens."""
    parts = tiny_hunyuan_video_1_5(tokenizer).components
    transformer = HunyuanVideo15Transformer3DModel.from_config(parts["transformer"].config, task_type="i2v")
    vision = {
        "image_encoder": tiny_siglip_vision(width=8, image_size=16, patch_size=8),
        "feature_extractor": SiglipImageProcessorPil(size={"height": 16, "width": 16}),
    }
    return HunyuanVideo15ImageToVideoPipeline(**{**parts, **vision, "transformer": transformer})


def tiny_ltx2(tokenizer: Any = None) -> LTX2Pipeline:
    """LTX-2, with an audio VAE and a vocoder that are never used."""
    tokenizer = tokenizer or tiny_t5_tokenizer()
    registers = {f"{track}_connector_num_learnable_registers": 16 for track in ("video", "audio")}
    heads = {f"{track}_connector_num_attention_heads": 2 for track in ("video", "audio")}
    widths = {f"{track}_connector_attention_head_dim": 8 for track in ("video", "audio")}
    return LTX2Pipeline(
        transformer=LTX2VideoTransformer3DModel(
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
            caption_channels=16,
            rope_type="split",
        ),
        scheduler=ltx2.SCHEDULER.build(),
        vae=AutoencoderKLLTX2Video(
            **ltx2.VAE.arguments,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 16, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1),
        ),
        audio_vae=AutoencoderKLLTX2Audio(base_channels=4, ch_mult=(1, 1, 1), num_res_blocks=1),
        text_encoder=tiny_gemma3(tokenizer, width=16),
        tokenizer=tokenizer,
        connectors=LTX2TextConnectors(
            caption_channels=16, text_proj_in_factor=3, rope_type="split", **registers, **heads, **widths
        ),
        vocoder=LTX2Vocoder(
            in_channels=4,
            hidden_channels=4,
            upsample_kernel_sizes=[4],
            upsample_factors=[2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1]],
        ),
    )
