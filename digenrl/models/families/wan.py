"""Wan2.1 text-to-video: latents (16, F, h, w), UMT5 text padded with zeros, true classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.models.contract import Conditioning, SampleSize, Schedule
from digenrl.models.families.video_helpers import latent_frames_height_width, pixels_of_videos, vae_latents
from digenrl.models.family import Family, FullSize, Part
from digenrl.models.pipeline_model import (
    PipelineModel,
    at_least_fp32,
    both_branches,
    negative_side,
    paired_negatives,
    schedule_of,
)
from digenrl.models.tiny import seeded_weights, tiny_t5_tokenizer
from digenrl.models.tiny_video import tiny_umt5

TEXT_LENGTH = 512  # tokens; the pipeline's own default


class WanModel(PipelineModel):
    """L = (C, F, h, w). The text has a fixed length, zeros behind a prompt's end: there is no mask."""

    family = "wan"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    default_guidance = 5.0
    passed_through_blocks = ("hidden_states",)
    text_encoders = ("text_encoder",)

    def __init__(self, pipeline: Any) -> None:
        config = pipeline.config
        if pipeline.transformer_2 is not None or config.boundary_ratio is not None or config.expand_timesteps:
            raise ConfigError(
                "wan: this is a Wan2.2 pipeline (a second transformer, or a time-step for every token); "
                "known: Wan2.1 text-to-video; name the directory of one"
            )
        super().__init__(pipeline)

    @property
    def text_length(self) -> int:
        """To how many tokens the text is padded or cut."""
        return min(TEXT_LENGTH, int(self.pipeline.tokenizer.model_max_length))

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        """Both branches, as the pipeline encodes them."""
        device = self.text_device()
        positive, negative = self.pipeline.encode_prompt(
            list(prompts),
            negative_prompt=paired_negatives(prompts, negative_prompts),
            max_sequence_length=self.text_length,
            device=device,
        )
        return Conditioning({"encoder_hidden_states": positive}, {"encoder_hidden_states": negative})

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """UniPC's noise levels, of which the first is .999999, and its time-steps, which are whole numbers.

        Nothing else of UniPC is used: the steps between its levels are Euler's or stochastic ones, because a step
        of a multistep solver has no probability to score.
        """
        scheduler = self.fresh_scheduler()
        scheduler.set_timesteps(steps)
        return schedule_of(scheduler)

    def shifted_schedule(self, steps: int, shift: float) -> Schedule:
        """UniPC's levels under this shift: its own spacing, which is even to within .001."""
        scheduler = self.fresh_scheduler(flow_shift=shift)
        scheduler.set_timesteps(steps)
        return schedule_of(scheduler)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        """(C, F, h, w)."""
        frames_per_latent = self.pipeline.vae_scale_factor_temporal
        pixels_per_latent = self.pipeline.vae_scale_factor_spatial
        grid = latent_frames_height_width(size, frames_per_latent, pixels_per_latent)
        return self.vae.config.z_dim, *grid

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
        """v of every row. With guidance, both branches are one batch of the transformer."""
        if guidance <= 1:
            return at_least_fp32(self._forward(latents_BL, timesteps_B, conditioning.positive))
        conditional_BL, unconditional_BL = both_branches(
            self._forward, latents_BL, timesteps_B, conditioning.positive, negative_side(conditioning)
        )
        return at_least_fp32(unconditional_BL + guidance * (conditional_BL - unconditional_BL))

    def _forward(self, latents_BL: Tensor, timesteps_B: Tensor, text: Mapping[str, Tensor | None]) -> Tensor:
        dtype = self.dtype
        output: Tensor = self.transformer(
            hidden_states=latents_BL.to(dtype),
            timestep=timesteps_B.to(latents_BL.device),
            return_dict=False,
            **{name: None if value is None else value.to(dtype) for name, value in text.items()},
        )[0]
        return output

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        """Pixels in [0, 1], fp32: (B, frames, 3, height, width)."""
        return pixels_of_videos(self.vae.decode(vae_latents(self.vae, latents_BL), return_dict=False)[0])


# A shift of 3 is for 480p. For 720p the published advice is 5: flow_shift in the pipeline's scheduler_config.json.
SCHEDULER = Part(
    UniPCMultistepScheduler, {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
)


def _call_arguments(model: WanModel, guidance: float) -> dict[str, Any]:
    return {"guidance_scale": guidance, "max_sequence_length": model.text_length}


def _write_tiny(directory: Path, seed: int) -> None:
    tokenizer = tiny_t5_tokenizer()
    with seeded_weights(seed):
        pipeline = WanPipeline(
            transformer=WanTransformer3DModel(
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                text_dim=16,
                freq_dim=32,
                ffn_dim=64,
                rope_max_seq_len=64,
            ),
            scheduler=SCHEDULER.build(),
            vae=AutoencoderKLWan(base_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1),
            text_encoder=tiny_umt5(tokenizer, width=16),
            tokenizer=tokenizer,
        )
    pipeline.save_pretrained(directory)


def _full(billions: float, layers: int, heads: int, ffn_dim: int) -> FullSize:
    shape = {"num_layers": layers, "num_attention_heads": heads, "ffn_dim": ffn_dim}
    return FullSize(
        billions, Part(WanTransformer3DModel, shape), text_shapes={"encoder_hidden_states": (TEXT_LENGTH, 4096)}
    )


WAN = Family(
    kind="video",
    pipeline_class=WanPipeline,
    model_class=WanModel,
    sizes={
        "2.1-1.3b": _full(1.42, layers=30, heads=12, ffn_dim=8960),
        "2.1-14b": _full(14.29, layers=40, heads=40, ffn_dim=13824),
    },
    vae=Part(AutoencoderKLWan, {}),
    scheduler=SCHEDULER,
    write_tiny=_write_tiny,
    tiny_size=SampleSize(height=32, width=32, frames=5),
    call_arguments=_call_arguments,
    uses_negative_prompts=True,
)
