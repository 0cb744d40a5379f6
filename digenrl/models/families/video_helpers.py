"""What Qwen-Image, Wan and HunyuanVideo share: their VAEs are video VAEs, with 4 frames to a latent frame.

Shape legend as in `digenrl.models.contract`; P = the channels of a pixel (3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.models.contract import SampleSize
from digenrl.models.pipeline_model import latent_height_width


def latent_frames_height_width(
    size: SampleSize, frames_per_latent: int, pixels_per_latent: int
) -> tuple[int, int, int]:
    """(F, h, w) of a video's latents; raises ConfigError where the size does not divide.

    The first frame has a latent frame of its own.
    """
    if size.frames < 1 or size.frames % frames_per_latent != 1:
        raise ConfigError(f"frames must be {frames_per_latent} k + 1, such as 33 or 53, got {size.frames}")
    return (size.frames - 1) // frames_per_latent + 1, *latent_height_width(size, pixels_per_latent)


def vae_latents(vae: Any, latents_BCFHW: Tensor) -> Tensor:
    """Latents as a VAE with a mean and a spread per channel (Wan's, Qwen-Image's) takes them."""
    latents = latents_BCFHW.to(vae.dtype)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(latents)
    # Divided by the inverse, not multiplied: the last bit is then that of the pipelines' own decoding.
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(latents)
    return latents / inverse_std + mean


def pixels_of_videos(decoded_BPFHW: Tensor) -> Tensor:
    """What a video VAE gives, in about [-1, 1], as (B, frames, 3, height, width) in [0, 1], fp32."""
    return (decoded_BPFHW * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 1, 3, 4).float()
