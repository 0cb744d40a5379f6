"""Building blocks of the model families: guidance, sizes, schedules and pixels.

Shape legend as in `digenrl.models.contract`; P = the channels of a pixel (3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize, Schedule, Text
from digenrl.models.pipeline_model import PipelineModel, at_least_fp32, negative_side, schedule_of

NOTHING: Text = MappingProxyType({})

# The linear layers of attention between an image and a text stream.
JOINT_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def refuse_negatives(negative_prompts: Sequence[str] | None, family: str) -> None:
    """Raises ConfigError if a family with embedded guidance is given negative prompts."""
    if negative_prompts is not None:
        raise ConfigError(f"{family} has embedded guidance and takes no negative prompts; leave them out")


def guided_together(
    forward: Callable[[Tensor, Tensor, Text], Tensor],
    latents_BL: Tensor,
    timesteps_B: Tensor,
    conditioning: Conditioning,
    guidance: float,
) -> Tensor:
    """Classifier-free guidance, with both branches in one batch; a guidance of 1 or less takes one branch alone.

    The texts of both branches must have the same length.
    """
    if guidance <= 1:
        return forward(latents_BL, timesteps_B, conditioning.positive)
    negative = negative_side(conditioning)
    pairs = {name: (value, negative[name]) for name, value in conditioning.positive.items()}
    text = {name: None if a is None or b is None else torch.cat([b, a]) for name, (a, b) in pairs.items()}
    both = forward(torch.cat([latents_BL] * 2), torch.cat([timesteps_B] * 2), text)
    unconditional_BL, conditional_BL = both.chunk(2)  # in the order of the diffusers pipelines
    return unconditional_BL + guidance * (conditional_BL - unconditional_BL)


def guided_velocity(
    model: DiffusionModel,
    latents_BL: Tensor,
    timesteps_B: Tensor,
    conditioning: Conditioning,
    guidance: float,
    *,
    channels_BL: Tensor | None = None,
    shared: Text = NOTHING,
) -> Tensor:
    """As `guided_together`, for transformers that take latents, timesteps and text as they are.

    `channels_BL` follow the latents' channels, and `shared` arguments are those of both branches.
    """

    def forward(latents_BL: Tensor, timesteps_B: Tensor, text: Text) -> Tensor:
        arguments = text_like(text, latents_BL)
        timesteps_B = timesteps_B.to(latents_BL.device)
        if channels_BL is not None:
            further_BL = channels_BL.to(latents_BL)
            further_BL = further_BL.repeat(len(latents_BL) // len(further_BL), *[1] * (further_BL.ndim - 1))
            latents_BL = torch.cat([latents_BL, further_BL], dim=1)
        output: Tensor = model.transformer(
            hidden_states=latents_BL, timestep=timesteps_B, return_dict=False, **arguments
        )[0]
        return output

    negative = None if conditioning.negative is None else {**conditioning.negative, **shared}
    text = Conditioning({**conditioning.positive, **shared}, negative)
    return at_least_fp32(guided_together(forward, latents_BL.to(model.dtype), timesteps_B, text, guidance))


def text_like(text: Text, latents_BL: Tensor) -> dict[str, Tensor | None]:
    """Text arguments with the device and dtype of the latents."""
    return {name: None if value is None else value.to(latents_BL) for name, value in text.items()}


def require_one_frame(size: SampleSize, family: str) -> None:
    """Raises ConfigError if an image family is asked for a video."""
    if size.frames != 1:
        raise ConfigError(f"{family} generates images: frames must be 1, got {size.frames}")


def latent_height_width(size: SampleSize, pixels_per_latent: int, patch: int = 2) -> tuple[int, int]:
    """(h, w) of the latents; raises ConfigError unless both sides are a whole number of patches."""
    multiple = pixels_per_latent * patch
    if size.height < multiple or size.width < multiple or size.height % multiple or size.width % multiple:
        raise ConfigError(
            f"height and width must be positive multiples of {multiple}, got {size.height} x {size.width}"
        )
    return size.height // pixels_per_latent, size.width // pixels_per_latent


def latent_frames_height_width(
    size: SampleSize, frames_per_latent: int, pixels_per_latent: int, patch: int = 2
) -> tuple[int, int, int]:
    """(F, h, w) of a video's latents; raises ConfigError if the size does not divide.

    The first frame is a latent frame by itself.
    """
    if size.frames < 1 or size.frames % frames_per_latent != 1:
        raise ConfigError(f"frames must be {frames_per_latent} k + 1, such as 33 or 53, got {size.frames}")
    return (size.frames - 1) // frames_per_latent + 1, *latent_height_width(size, pixels_per_latent, patch)


def shift_from_tokens(config: Mapping[str, Any], tokens: int, default_max_shift: float) -> float:
    """mu, the schedule's shift for this number of image tokens: linear between two points of the configuration.

    The order of operations is that of the diffusers pipelines, so that schedules are bitwise equal to theirs.
    """
    base_tokens, max_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, max_shift = config.get("base_shift", 0.5), config.get("max_shift", default_max_shift)
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return float(tokens * slope + (base_shift - slope * base_tokens))


def stretched_schedule(
    model: PipelineModel, steps: int, tokens: int, default_max_shift: float, sigmas: Sequence[float] | None = None
) -> Schedule:
    """Evenly spaced sigmas, or these, shifted by the number of tokens, stretched to the scheduler's last value.

    A single step starts from 1, which cannot be stretched: the scheduler would divide 0 by 0.
    """
    scheduler = model.fresh_scheduler(shift_terminal=None) if steps == 1 else model.fresh_scheduler()
    shift = shift_from_tokens(scheduler.config, tokens, default_max_shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps) if sigmas is None else sigmas, mu=shift)
    return schedule_of(scheduler)


def scaled_video_latents(vae: Any, latents_BCFHW: Tensor) -> Tensor:
    """Latents as a VAE with a mean and a standard deviation per channel (Wan's, Qwen-Image's) takes them."""
    latents = latents_BCFHW.to(vae.dtype)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(latents)
    # Dividing by the inverse, not multiplying, makes the result bitwise equal to that of the pipelines.
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(latents)
    return latents / inverse_std + mean


def unscaled_video_latents(vae: Any, latents_BCFHW: Tensor) -> Tensor:
    """The inverse of `scaled_video_latents`, in fp32."""
    latents = latents_BCFHW.float()
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (latents - mean) / std


def image_latents(vae: Any, pixels_BFCHW: Tensor) -> Tensor:
    """The most likely latents of images in [0, 1], as the VAE of an image family returns them: (B, C, h, w)."""
    inputs_BCHW = 2 * pixels_BFCHW.squeeze(1).to(vae.device, vae.dtype) - 1
    latents_BCHW: Tensor = vae.encode(inputs_BCHW).latent_dist.mode()
    return latents_BCHW


def source_name(index: int) -> str:
    """The name of a source image's latents in `Conditioning.images`."""
    return f"source_{index}"


def vae_inputs(processor: Any, image: Image.Image) -> Tensor:
    """A source image as the pipeline's image processor prepares it for the VAE, at its own size: (1, 3, H, W)."""
    pixels: Tensor = processor.preprocess(image, image.height, image.width)
    return pixels


def pixels_of_images(decoded_BPHW: Tensor) -> Tensor:
    """The output of an image VAE, in about [-1, 1], as (B, 1, 3, height, width) in [0, 1], fp32."""
    return pixels_of_videos(decoded_BPHW.unsqueeze(2))


def pixels_of_videos(decoded_BPFHW: Tensor) -> Tensor:
    """The output of a video VAE, in about [-1, 1], as (B, frames, 3, height, width) in [0, 1], fp32."""
    return (decoded_BPFHW * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 1, 3, 4).float()
