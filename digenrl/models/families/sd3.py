"""Stable Diffusion 3 and 3.5: two CLIP encoders and T5, an unpacked latent, true classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor

from digenrl.models.contract import Conditioning, SampleSize, Schedule
from digenrl.models.family import Family, FullSize, Part
from digenrl.models.pipeline_model import (
    PipelineModel,
    at_least_fp32,
    both_branches,
    latent_height_width,
    negative_side,
    paired_negatives,
    pixels_of_images,
    require_one_frame,
    schedule_of,
    shift_from_tokens,
)
from digenrl.models.tiny import (
    seeded_weights,
    tiny_clip_tokenizer,
    tiny_clip_with_projection,
    tiny_image_vae,
    tiny_t5,
    tiny_t5_tokenizer,
)

T5_LENGTH = 256  # tokens; the pipeline's own default

Text = Mapping[str, Tensor | None]


class SD3Model(PipelineModel):
    """L = (C, h, w). The text is CLIP's 77 tokens followed by T5's, all of them always there: there is no mask."""

    family = "sd3"
    lora_targets = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
    default_guidance = 4.5
    text_encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")

    @property
    def t5_length(self) -> int:
        """To how many tokens T5's part of the text is padded or cut."""
        return min(T5_LENGTH, int(self.pipeline.tokenizer_3.model_max_length))

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        """Both branches, as the pipeline encodes them."""
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
        """Shifted by a fixed amount, or by the number of tokens where the scheduler's configuration says so."""
        scheduler = self.fresh_scheduler()
        _, h, w = self.noise_shape(size)
        shift = {}
        if scheduler.config.get("use_dynamic_shifting", None):
            shift["mu"] = shift_from_tokens(scheduler.config, tokens=(h // 2) * (w // 2), default_max_shift=1.16)
        scheduler.set_timesteps(steps, **shift)
        return schedule_of(scheduler)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        """(C, h, w)."""
        require_one_frame(size, self.family)
        h, w = latent_height_width(size, self.pipeline.vae_scale_factor)
        return self.vae.config.latent_channels, h, w

    def initial_latents(self, noise_B: Tensor, size: SampleSize) -> Tensor:
        """The noise itself."""
        return noise_B.to(self.device)

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """v of every row. With guidance, both branches are one batch of the transformer, as in the pipeline."""
        latents_BL = latents_BL.to(self.dtype)
        timesteps_B = timesteps_B.to(latents_BL.device)
        if guidance <= 1:
            return at_least_fp32(self._forward(latents_BL, timesteps_B, conditioning.positive))
        conditional_BL, unconditional_BL = both_branches(
            self._forward, latents_BL, timesteps_B, conditioning.positive, negative_side(conditioning)
        )
        return at_least_fp32(unconditional_BL + guidance * (conditional_BL - unconditional_BL))

    def _forward(self, latents_BL: Tensor, timesteps_B: Tensor, text: Text) -> Tensor:
        arguments = {name: None if value is None else value.to(latents_BL) for name, value in text.items()}
        output: Tensor = self.transformer(
            hidden_states=latents_BL, timestep=timesteps_B, return_dict=False, **arguments
        )[0]
        return output

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        """Pixels in [0, 1], fp32: (B, 1, 3, height, width)."""
        latents_BL = latents_BL.to(self.vae.dtype)
        latents_BL = latents_BL / self.vae.config.scaling_factor + self.vae.config.shift_factor
        return pixels_of_images(self.vae.decode(latents_BL, return_dict=False)[0])


SCHEDULER = Part(FlowMatchEulerDiscreteScheduler, {"shift": 3.0})
VAE = Part(
    AutoencoderKL,
    {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 16,
        "sample_size": 1024,
        "scaling_factor": 1.5305,
        "shift_factor": 0.0609,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
)
TEXT_SHAPES = {"encoder_hidden_states": (77 + T5_LENGTH, 4096), "pooled_projections": (2048,)}


def _call_arguments(model: SD3Model, guidance: float) -> dict[str, Any]:
    return {"guidance_scale": guidance, "max_sequence_length": model.t5_length}


def _write_tiny(directory: Path, seed: int) -> None:
    clip_tokenizer = tiny_clip_tokenizer()
    t5_tokenizer = tiny_t5_tokenizer()
    with seeded_weights(seed):
        pipeline = StableDiffusion3Pipeline(
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
            scheduler=SCHEDULER.build(),
            vae=tiny_image_vae(scaling_factor=1.5305, shift_factor=0.0609),
            text_encoder=tiny_clip_with_projection(clip_tokenizer, width=16),
            tokenizer=clip_tokenizer,
            text_encoder_2=tiny_clip_with_projection(clip_tokenizer, width=16),
            tokenizer_2=clip_tokenizer,
            text_encoder_3=tiny_t5(t5_tokenizer, width=32),
            tokenizer_3=t5_tokenizer,
        )
    pipeline.save_pretrained(directory)


def _full(billions: float, layers: int, **arguments: Any) -> FullSize:
    """A published size: as many heads of 64 as layers."""
    shape = {
        "num_layers": layers,
        "num_attention_heads": layers,
        "attention_head_dim": 64,
        "caption_projection_dim": 64 * layers,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
    }
    return FullSize(billions, Part(SD3Transformer2DModel, shape | arguments), TEXT_SHAPES)


SD3 = Family(
    kind="image",
    pipeline_class=StableDiffusion3Pipeline,
    model_class=SD3Model,
    sizes={
        "3.5-medium": _full(
            2.24, 24, pos_embed_max_size=384, dual_attention_layers=tuple(range(13)), qk_norm="rms_norm"
        ),
        "3.5-large": _full(8.06, 38, pos_embed_max_size=192, qk_norm="rms_norm"),
        "3-medium": _full(2.03, 24, pos_embed_max_size=192),
    },
    vae=VAE,
    scheduler=SCHEDULER,
    write_tiny=_write_tiny,
    tiny_size=SampleSize(height=32, width=32),
    call_arguments=_call_arguments,
    uses_negative_prompts=True,
)
