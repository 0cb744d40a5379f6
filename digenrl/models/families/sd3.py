"""Stable Diffusion 3 and 3.5: two CLIP encoders and T5, unpacked latents, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor

from digenrl.models.contract import Conditioning, SampleSize, Schedule
from digenrl.models.families.helpers import (
    JOINT_ATTENTION,
    guided_velocity,
    image_vae,
    latent_height_width,
    paired_negatives,
    pixels_of_images,
    require_one_frame,
    scaled_image_latents,
    shift_from_tokens,
)
from digenrl.models.family import Component, Family, FullSize
from digenrl.models.pipeline_model import PipelineModel, schedule_of

T5_LENGTH = 256  # tokens, the pipeline's default


class SD3Model(PipelineModel):
    """L = (C, h, w). The text is CLIP's 77 tokens followed by T5's, at a fixed length without a mask."""

    family = "sd3"
    lora_targets = JOINT_ATTENTION
    default_guidance = 4.5
    text_encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")

    @property
    def t5_length(self) -> int:
        """The number of tokens to which T5's part of the text is padded or cut."""
        return min(T5_LENGTH, int(self.pipeline.tokenizer_3.model_max_length))

    def pipeline_arguments(self, guidance: float) -> dict[str, Any]:
        return {"guidance_scale": guidance, "max_sequence_length": self.t5_length}

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        positive, negative, pooled, negative_pooled = self.pipeline.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            negative_prompt=paired_negatives(prompts, negative_prompts),
            device=self.text_device(),
            max_sequence_length=self.t5_length,
        )
        return Conditioning(
            positive={"encoder_hidden_states": positive, "pooled_projections": pooled},
            negative={"encoder_hidden_states": negative, "pooled_projections": negative_pooled},
        )

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """Shifted by a fixed amount, or by the number of tokens if the scheduler's configuration says so."""
        scheduler = self.fresh_scheduler()
        _, h, w = self.noise_shape(size)
        shift = {}
        if scheduler.config.get("use_dynamic_shifting", None):
            shift["mu"] = shift_from_tokens(scheduler.config, tokens=(h // 2) * (w // 2), default_max_shift=1.16)
        scheduler.set_timesteps(steps, **shift)
        return schedule_of(scheduler)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        require_one_frame(size, self.family)
        h, w = latent_height_width(size, self.pipeline.vae_scale_factor)
        return self.vae.config.latent_channels, h, w

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        return guided_velocity(self, latents_BL, timesteps_B, conditioning, guidance)

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        scaled_BCHW = scaled_image_latents(self.vae, latents_BL)
        return pixels_of_images(self.vae.decode(scaled_BCHW, return_dict=False)[0])


SCHEDULER = Component(FlowMatchEulerDiscreteScheduler, {"shift": 3.0})
TEXT_SHAPES = {"encoder_hidden_states": (77 + T5_LENGTH, 4096), "pooled_projections": (2048,)}


def _full(hub_id: str, billions: float, layers: int, **arguments: Any) -> FullSize:
    """A published size: it has as many heads, of width 64, as layers."""
    shape = {
        "num_layers": layers,
        "num_attention_heads": layers,
        "attention_head_dim": 64,
        "caption_projection_dim": 64 * layers,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
    }
    transformer = Component(SD3Transformer2DModel, shape | arguments)
    return FullSize(billions, transformer, TEXT_SHAPES, hub_id=f"stabilityai/{hub_id}")


SD3 = Family(
    kind="image",
    pipeline_class=StableDiffusion3Pipeline,
    model_class=SD3Model,
    sizes={
        "3.5-medium": _full(
            "stable-diffusion-3.5-medium",
            *(2.24, 24),
            pos_embed_max_size=384,
            dual_attention_layers=tuple(range(13)),
            qk_norm="rms_norm",
        ),
        "3.5-large": _full("stable-diffusion-3.5-large", 8.06, 38, pos_embed_max_size=192, qk_norm="rms_norm"),
        "3-medium": _full("stable-diffusion-3-medium-diffusers", 2.03, 24, pos_embed_max_size=192),
    },
    vae=image_vae(scaling_factor=1.5305, shift_factor=0.0609),
    scheduler=SCHEDULER,
    uses_negative_prompts=True,
)
