"""A tiny diffusers pipeline for every model family: all components of the real one, random weights.

Add a family's `TinyModel` to `TINY_MODELS`; the tests that run for every family then cover it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.guiders import ClassifierFreeGuidance
from transformers import (
    ByT5Tokenizer,
    CLIPImageProcessorPil,
    Qwen2VLImageProcessorPil,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from digenrl.config.reading import ConfigError
from digenrl.models.contract import SampleSize
from digenrl.models.families import (
    flux,
    flux2_klein,
    hunyuan_video,
    hunyuan_video_1_5,
    qwen_image,
    sd3,
    sd15,
    wan,
    wan_i2v,
    z_image,
)
from digenrl.models.loading import pipeline_without, without_progress_bars
from digenrl.models.registry import find_family
from digenrl.testing.tiny_text_encoders import (
    HUNYUAN_VIDEO_1_5_TEMPLATE,
    tiny_byt5,
    tiny_chat_tokenizer,
    tiny_clip,
    tiny_clip_tokenizer,
    tiny_clip_vision,
    tiny_clip_with_projection,
    tiny_llama,
    tiny_llama_tokenizer,
    tiny_mistral3,
    tiny_mistral_tokenizer,
    tiny_qwen3_config,
    tiny_qwen3_tokenizer,
    tiny_qwen_text_encoder,
    tiny_qwen_tokenizer,
    tiny_t5,
    tiny_t5_tokenizer,
    tiny_umt5,
)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """How a family's tiny pipeline is built, and the size of its samples.

    `build` takes a tokenizer of each kind, tiny ones by default.
    """

    build: Callable[..., Any]
    size: SampleSize


def make_tiny_pipeline(family: str, directory: Path, seed: int = 0) -> None:
    """Writes a family's tiny pipeline. The same seed writes the same weights; no network access is needed.

    The directory is created atomically; raises ConfigError if it exists and is not empty.
    """
    tiny = TINY_MODELS.get(find_family(family).name)
    if tiny is None:
        raise ConfigError(f"no tiny model of '{family}'; known: {', '.join(TINY_MODELS)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: exists and is not empty; name a new directory or empty this one")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be created: {error.strerror}") from None
    try:
        with without_progress_bars(), seeded_weights(seed):
            tiny.build().save_pretrained(partial)
        partial.chmod(0o755)  # mkdtemp's folders are private
        partial.replace(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def tiny_size(family: str) -> SampleSize:
    """The size of a sample of a family's tiny pipeline."""
    return TINY_MODELS[family].size


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Modules built inside get the same random weights every time; the caller's random state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _sd3(clip_tokenizer: Any = None, t5_tokenizer: Any = None) -> StableDiffusion3Pipeline:
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
        vae=tiny_image_vae(scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=tiny_clip_with_projection(clip_tokenizer, width=16),
        tokenizer=clip_tokenizer,
        text_encoder_2=tiny_clip_with_projection(clip_tokenizer, width=16),
        tokenizer_2=clip_tokenizer,
        text_encoder_3=tiny_t5(t5_tokenizer, width=32),
        tokenizer_3=t5_tokenizer,
    )


def _flux_kontext(clip_tokenizer: Any = None, t5_tokenizer: Any = None) -> FluxKontextPipeline:
    components = _flux(clip_tokenizer, t5_tokenizer).components
    return FluxKontextPipeline(**components)


def _flux(clip_tokenizer: Any = None, t5_tokenizer: Any = None) -> FluxPipeline:
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
        vae=tiny_image_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=tiny_clip(clip_tokenizer, width=16),
        tokenizer=clip_tokenizer,
        text_encoder_2=tiny_t5(t5_tokenizer, width=32),
        tokenizer_2=t5_tokenizer,
    )


def _flux2_klein(tokenizer: Any = None) -> Flux2KleinPipeline:
    tokenizer = tokenizer or tiny_qwen3_tokenizer()
    return Flux2KleinPipeline(
        transformer=Flux2Transformer2DModel(
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=3 * 8,
            guidance_embeds=False,
            axes_dims_rope=(2, 2, 2, 2),
        ),
        scheduler=flux2_klein.SCHEDULER.build(),
        vae=AutoencoderKLFlux2(block_out_channels=(4, 4, 4, 8), layers_per_block=1, norm_num_groups=2),
        # The pipeline reads layers 9, 18 and 27.
        text_encoder=Qwen3ForCausalLM(tiny_qwen3_config(tokenizer, width=8, layers=27)).eval(),
        tokenizer=tokenizer,
    )


def _flux2_dev(tokenizer: Any = None) -> Flux2Pipeline:
    tokenizer = tokenizer or tiny_mistral_tokenizer()
    return Flux2Pipeline(
        transformer=Flux2Transformer2DModel(
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=3 * 8,
            axes_dims_rope=(2, 2, 2, 2),
        ),
        scheduler=flux2_klein.SCHEDULER.build(),
        vae=AutoencoderKLFlux2(block_out_channels=(4, 4, 4, 8), layers_per_block=1, norm_num_groups=2),
        text_encoder=tiny_mistral3(tokenizer, width=8, layers=30),  # the pipeline reads 10, 20 and 30
        tokenizer=tokenizer,
    )


def _qwen_image(tokenizer: Any = None) -> QwenImagePipeline:
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


def _qwen_image_edit(tokenizer: Any = None) -> QwenImageEditPlusPipeline:
    template = pipeline_without(QwenImageEditPlusPipeline).prompt_template_encode
    tokenizer = tokenizer or tiny_qwen_tokenizer(f"{template} Picture 1: Picture 2:")
    text = _qwen_image(tokenizer)
    return QwenImageEditPlusPipeline(
        transformer=text.transformer,
        scheduler=text.scheduler,
        vae=text.vae,
        text_encoder=text.text_encoder,
        tokenizer=tokenizer,
        processor=Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 256),
    )


def _z_image(tokenizer: Any = None) -> ZImagePipeline:
    tokenizer = tokenizer or tiny_qwen3_tokenizer()
    transformer = ZImageTransformer2DModel(
        dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16, axes_dims=[4, 6, 6]
    )
    for pad_token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(pad_token)  # zeros would hide how texts are padded
    return ZImagePipeline(
        transformer=transformer,
        scheduler=z_image.SCHEDULER.build(),
        vae=tiny_image_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=Qwen3Model(tiny_qwen3_config(tokenizer, width=16, layers=2)).eval(),
        tokenizer=tokenizer,
    )


def _wan(tokenizer: Any = None) -> WanPipeline:
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


def _wan_i2v(tokenizer: Any = None) -> WanImageToVideoPipeline:
    """As Wan2.2 A14B from images, without an image encoder, but with one transformer."""
    parts = _wan(tokenizer).components
    transformer = WanTransformer3DModel.from_config(parts["transformer"].config, in_channels=36)
    return WanImageToVideoPipeline(**{**parts, "transformer": transformer})


def tiny_wan_i2v_a14b() -> WanImageToVideoPipeline:
    """Wan2.2 A14B from images: a second transformer, for low noise levels."""
    parts = _wan_i2v().components
    second = WanTransformer3DModel.from_config(parts["transformer"].config)
    return WanImageToVideoPipeline(**{**parts, "transformer_2": second}, **wan_i2v.SETTINGS_A14B)


def tiny_wan_i2v_2_1(*, last_frame: bool) -> WanImageToVideoPipeline:
    """Wan2.1 from the first frame, or from the first and the last, with an image encoder of 5 tokens per image."""
    parts = _wan_i2v().components
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


def _sd15(tokenizer: Any = None) -> StableDiffusionPipeline:
    tokenizer = tokenizer or tiny_clip_tokenizer()
    return StableDiffusionPipeline(
        unet=_tiny_unet(cross_attention_dim=16),
        scheduler=sd15.SCHEDULER.build(),
        vae=_tiny_unet_vae(scaling_factor=0.18215),
        text_encoder=tiny_clip(tokenizer, width=16),
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl(tokenizer: Any = None) -> StableDiffusionXLPipeline:
    tokenizer = tokenizer or tiny_clip_tokenizer()
    return StableDiffusionXLPipeline(
        unet=_tiny_unet(
            cross_attention_dim=32,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 1280,
            use_linear_projection=True,
        ),
        scheduler=sd15.SCHEDULER.build(),
        vae=_tiny_unet_vae(scaling_factor=0.13025),
        text_encoder=tiny_clip(tokenizer, width=16),
        tokenizer=tokenizer,
        text_encoder_2=tiny_clip_with_projection(tokenizer, width=16, projected=1280),
        tokenizer_2=tokenizer,
        add_watermarker=False,
    )


def _tiny_unet(**arguments: Any) -> UNet2DConditionModel:
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


def _tiny_unet_vae(scaling_factor: float) -> AutoencoderKL:
    shape = {"block_out_channels": (4, 4, 4, 8), "layers_per_block": 1, "norm_num_groups": 2}
    return AutoencoderKL(**(sd15.VAE_SHAPE | shape), scaling_factor=scaling_factor, force_upcast=False)


def tiny_wan_a14b() -> WanPipeline:
    """Wan2.2 A14B: a second transformer with other weights, for low noise levels."""
    pipeline = _wan()
    second = WanTransformer3DModel.from_config(pipeline.transformer.config)
    return WanPipeline(**{**pipeline.components, "transformer_2": second}, **wan.SETTINGS_A14B)


def tiny_wan_2_2() -> WanPipeline:
    """Wan2.2 5B: another VAE, 48 latent channels and 16 pixels per latent, and a timestep per token."""
    tokenizer = tiny_t5_tokenizer()
    vae = {**wan.VAE_2_2.arguments, "base_dim": 4, "decoder_base_dim": 4, "dim_mult": [1, 2, 2, 2]}
    return WanPipeline(
        transformer=WanTransformer3DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            in_channels=48,
            out_channels=48,
            text_dim=16,
            freq_dim=32,
            ffn_dim=64,
            rope_max_seq_len=64,
        ),
        scheduler=wan.SCHEDULER_2_2.build(),
        vae=AutoencoderKLWan(**vae, num_res_blocks=1),
        text_encoder=tiny_umt5(tokenizer, width=16),
        tokenizer=tokenizer,
        **wan.SETTINGS_2_2,
    )


def _hunyuan_video(tokenizer: Any = None, clip_tokenizer: Any = None) -> HunyuanVideoPipeline:
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


def _hunyuan_video_1_5(tokenizer: Any = None) -> HunyuanVideo15Pipeline:
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
        vae=AutoencoderKLHunyuanVideo15(block_out_channels=(4, 4, 8, 32, 32), layers_per_block=1),
        text_encoder=tiny_qwen_text_encoder(tokenizer, width=16, layers=3).model.language_model,
        tokenizer=tokenizer,
        text_encoder_2=tiny_byt5(width=8),
        tokenizer_2=ByT5Tokenizer(extra_ids=0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )


def tiny_image_vae(scaling_factor: float, shift_factor: float) -> AutoencoderKL:
    """16 latent channels and 8 pixels per latent, as SD3 and FLUX have."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 8),
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=16,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


IMAGE = SampleSize(height=32, width=32)
LARGER_IMAGE = SampleSize(height=64, width=64)  # what the UNet of full size takes, too
VIDEO = SampleSize(height=32, width=32, frames=5)

TINY_MODELS: dict[str, TinyModel] = {
    "sd3": TinyModel(_sd3, IMAGE),
    "flux": TinyModel(_flux, IMAGE),
    "flux_kontext": TinyModel(_flux_kontext, IMAGE),
    "flux2_klein": TinyModel(_flux2_klein, IMAGE),
    "flux2_dev": TinyModel(_flux2_dev, IMAGE),
    "qwen_image": TinyModel(_qwen_image, IMAGE),
    "qwen_image_edit": TinyModel(_qwen_image_edit, IMAGE),
    "z_image": TinyModel(_z_image, IMAGE),
    "sdxl": TinyModel(_sdxl, LARGER_IMAGE),
    "sd15": TinyModel(_sd15, LARGER_IMAGE),
    "wan": TinyModel(_wan, VIDEO),
    "wan_i2v": TinyModel(_wan_i2v, VIDEO),
    "hunyuan_video": TinyModel(_hunyuan_video, VIDEO),
    "hunyuan_video_1_5": TinyModel(_hunyuan_video_1_5, VIDEO),
}
