"""A tiny diffusers pipeline of every image family: all components of the real one, random weights.

A builder takes a tokenizer of each kind, tiny ones by default.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImage21Transformer2DModel,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import Qwen2VLImageProcessorPil, Qwen3ForCausalLM, Qwen3Model

from digenrl.models.families import flux, flux2_klein, qwen_image, sd3, sd15, sdxl, z_image
from digenrl.models.families.parts.qwen_stream import QwenImage21Pipeline
from digenrl.models.family import Component
from digenrl.models.loading.pipelines import pipeline_without
from digenrl.testing.tiny_text_encoders import (
    tiny_clip,
    tiny_clip_tokenizer,
    tiny_clip_with_projection,
    tiny_mistral3,
    tiny_mistral_tokenizer,
    tiny_qwen3_config,
    tiny_qwen3_tokenizer,
    tiny_qwen_tokenizer,
    tiny_t5,
    tiny_t5_tokenizer,
)
from digenrl.testing.tiny_vision_encoders import tiny_qwen3_vl, tiny_qwen_text_encoder


def tiny_sd3(clip_tokenizer: Any = None, t5_tokenizer: Any = None) -> StableDiffusion3Pipeline:
    clip_tokenizer = clip_tokenizer or tiny_clip_tokenizer()
    t5_tokenizer = t5_tokenizer or tiny_t5_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            in_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=32,
            out_channels=16,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        scheduler=sd3.SCHEDULER.build(),
        vae=tiny_vae(sd3.SD3.vae),
        text_encoder=tiny_clip_with_projection(clip_tokenizer, width=16),
        tokenizer=clip_tokenizer,
        text_encoder_2=tiny_clip_with_projection(clip_tokenizer, width=16),
        tokenizer_2=clip_tokenizer,
        text_encoder_3=tiny_t5(t5_tokenizer, width=32),
        tokenizer_3=t5_tokenizer,
    )


def tiny_flux_kontext(clip_tokenizer: Any = None, t5_tokenizer: Any = None) -> FluxKontextPipeline:
    """FLUX.1-Kontext: the components of FLUX.1."""
    components = tiny_flux(clip_tokenizer, t5_tokenizer).components
    return FluxKontextPipeline(**components)


def tiny_flux(clip_tokenizer: Any = None, t5_tokenizer: Any = None) -> FluxPipeline:
    clip_tokenizer = clip_tokenizer or tiny_clip_tokenizer()
    t5_tokenizer = t5_tokenizer or tiny_t5_tokenizer()
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            guidance_embeds=True,
            axes_dims_rope=(2, 2, 4),
        ),
        scheduler=flux.SCHEDULER.build(),
        vae=tiny_vae(flux.FLUX.vae),
        text_encoder=tiny_clip(clip_tokenizer, width=16),
        tokenizer=clip_tokenizer,
        text_encoder_2=tiny_t5(t5_tokenizer, width=32),
        tokenizer_2=t5_tokenizer,
    )


def tiny_flux2_klein(tokenizer: Any = None) -> Flux2KleinPipeline:
    """FLUX.2 klein, whose pipeline reads layers 9, 18 and 27 of the text encoder."""
    tokenizer = tokenizer or tiny_qwen3_tokenizer()
    text_encoder = Qwen3ForCausalLM(tiny_qwen3_config(tokenizer, width=8, layers=27)).eval()
    return Flux2KleinPipeline(
        **_flux2_parts(guidance_embeds=False), text_encoder=text_encoder, tokenizer=tokenizer
    )


def tiny_flux2_dev(tokenizer: Any = None) -> Flux2Pipeline:
    """FLUX.2 dev, whose pipeline reads layers 10, 20 and 30 of the text encoder."""
    tokenizer = tokenizer or tiny_mistral_tokenizer()
    text_encoder = tiny_mistral3(tokenizer, width=8, layers=30)
    return Flux2Pipeline(**_flux2_parts(guidance_embeds=True), text_encoder=text_encoder, tokenizer=tokenizer)


def _flux2_parts(*, guidance_embeds: bool) -> dict[str, Any]:
    transformer = Flux2Transformer2DModel(
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=3 * 8,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(2, 2, 2, 2),
    )
    vae = AutoencoderKLFlux2(block_out_channels=(4, 4, 4, 8), layers_per_block=1, norm_num_groups=2)
    return {"transformer": transformer, "scheduler": flux2_klein.SCHEDULER.build(), "vae": vae}


def tiny_qwen_image(tokenizer: Any = None) -> QwenImagePipeline:
    tokenizer = tokenizer or tiny_qwen_tokenizer(pipeline_without(QwenImagePipeline).prompt_template_encode)
    return QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=qwen_image.SCHEDULER.build(),
        vae=AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1),
        text_encoder=tiny_qwen_text_encoder(tokenizer, width=16),
        tokenizer=tokenizer,
    )


def tiny_qwen_image_edit(tokenizer: Any = None) -> QwenImageEditPlusPipeline:
    """Qwen-Image-Edit-2509."""
    template = pipeline_without(QwenImageEditPlusPipeline).prompt_template_encode
    tokenizer = tokenizer or tiny_qwen_tokenizer(f"{template} Picture 1: Picture 2:")
    text = tiny_qwen_image(tokenizer)
    return QwenImageEditPlusPipeline(
        transformer=text.transformer,
        scheduler=text.scheduler,
        vae=text.vae,
        text_encoder=text.text_encoder,
        tokenizer=tokenizer,
        processor=Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 256),
    )


def tiny_qwen_image_2_1(tokenizer: Any = None) -> QwenImage21Pipeline:
    """Qwen-Image 2.1 with a tokenizer as its processor."""
    tokenizer = tokenizer or tiny_qwen_tokenizer(pipeline_without(QwenImage21Pipeline).prompt_template_t2i)
    pipeline: QwenImage21Pipeline = QwenImage21Pipeline(
        transformer=QwenImage21Transformer2DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=16,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=qwen_image.SCHEDULER.build(),
        vae=AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=4, dim_mult=[1, 2, 2, 2, 2], num_res_blocks=1),
        text_encoder=tiny_qwen3_vl(tokenizer, width=16),
        processor=tokenizer,
    )
    return pipeline


def tiny_z_image(tokenizer: Any = None) -> ZImagePipeline:
    tokenizer = tokenizer or tiny_qwen3_tokenizer()
    transformer = ZImageTransformer2DModel(
        dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16, axes_dims=[4, 6, 6]
    )
    for pad_token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(pad_token)  # zeros would hide how texts are padded
    return ZImagePipeline(
        transformer=transformer,
        scheduler=z_image.SCHEDULER.build(),
        vae=tiny_vae(z_image.Z_IMAGE.vae),
        text_encoder=Qwen3Model(tiny_qwen3_config(tokenizer, width=16, layers=2)).eval(),
        tokenizer=tokenizer,
    )


def tiny_sd15(tokenizer: Any = None) -> StableDiffusionPipeline:
    tokenizer = tokenizer or tiny_clip_tokenizer()
    return StableDiffusionPipeline(
        unet=_unet(cross_attention_dim=16),
        scheduler=sd15.SCHEDULER.build(),
        vae=tiny_vae(sd15.SD15.vae),
        text_encoder=tiny_clip(tokenizer, width=16),
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def tiny_sdxl(tokenizer: Any = None) -> StableDiffusionXLPipeline:
    tokenizer = tokenizer or tiny_clip_tokenizer()
    return StableDiffusionXLPipeline(
        unet=_unet(
            cross_attention_dim=32,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 1280,
            use_linear_projection=True,
        ),
        scheduler=sd15.SCHEDULER.build(),
        vae=tiny_vae(sdxl.SDXL.vae),
        text_encoder=tiny_clip(tokenizer, width=16),
        tokenizer=tokenizer,
        text_encoder_2=tiny_clip_with_projection(tokenizer, width=16, projected=1280),
        tokenizer_2=tokenizer,
        add_watermarker=False,
    )


def _unet(**arguments: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=2,
        norm_num_groups=4,
        **arguments,
    )


def tiny_vae(published: Component) -> AutoencoderKL:
    """The published VAE with fewer channels and layers."""
    shape = {"block_out_channels": (4, 4, 4, 8), "layers_per_block": 1, "norm_num_groups": 2, "sample_size": 32}
    return AutoencoderKL(**{**published.arguments, **shape}, force_upcast=False)
