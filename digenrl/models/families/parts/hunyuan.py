"""What HunyuanVideo and HunyuanVideo 1.5 share: a fixed shift, latents (C, F, h, w), and their VAE's scale."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from digenrl.models.contract import SampleSize, Schedule
from digenrl.models.families.parts.helpers import JOINT_ATTENTION, latent_frames_height_width, pixels_of_videos
from digenrl.models.pipeline_model import PipelineModel, schedule_of


class HunyuanModel(PipelineModel):
    """L = (C, F, h, w). Text is stored at a fixed length with a mask; forwards drop unneeded padding."""

    lora_targets = JOINT_ATTENTION
    default_guidance = 6.0
    block_state_arguments = ("hidden_states", "encoder_hidden_states")
    text_encoders = ("text_encoder", "text_encoder_2")
    text_mask = "encoder_attention_mask"
    patch: ClassVar[int] = 2  # the side of a token, in latents

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """Evenly spaced sigmas from 1, shifted by the scheduler's fixed amount.

        The sigmas are passed in: the scheduler's default end point is already shifted and would be shifted twice.
        """
        scheduler = self.fresh_scheduler()
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
        return schedule_of(scheduler)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        frames_per_latent = self.pipeline.vae_scale_factor_temporal
        pixels_per_latent = self.pipeline.vae_scale_factor_spatial
        grid = latent_frames_height_width(size, frames_per_latent, pixels_per_latent, self.patch)
        return self.vae.config.latent_channels, *grid

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        latents_BL = latents_BL.to(self.vae.dtype) / self.vae.config.scaling_factor
        return pixels_of_videos(self.vae.decode(latents_BL, return_dict=False)[0])
