"""The VAEs with 8 pixels per latent: of UNets, and with 16 latent channels of SD3, FLUX.1 and Z-Image."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from digenrl.models.contract import SampleSize
from digenrl.models.families.parts.helpers import (
    image_latents,
    latent_height_width,
    pixels_of_images,
    require_one_frame,
)
from digenrl.models.family import Component
from digenrl.models.pipeline_model import PipelineModel

VAE_SHAPE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
}


class ImageVaeModel(PipelineModel):
    """Noise, encoded pixels and latents to decode have the layout (C, h, w)."""

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        require_one_frame(size, self.family)
        return self.vae.config.latent_channels, *latent_height_width(size, self.pipeline.vae_scale_factor)

    @torch.no_grad()
    def encode_pixels(self, pixels_BFCHW: Tensor) -> Tensor:
        latents_BCHW, config = image_latents(self.vae, pixels_BFCHW), self.vae.config
        unscaled: Tensor = (latents_BCHW - (config.shift_factor or 0.0)) * config.scaling_factor
        return unscaled.float()

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        config = self.vae.config
        scaled_BCHW = latents_BL.to(self.vae.dtype) / config.scaling_factor + (config.shift_factor or 0.0)
        return pixels_of_images(self.vae.decode(scaled_BCHW, return_dict=False)[0])


def image_vae(scaling_factor: float, shift_factor: float) -> Component:
    """The published VAE with 16 latent channels."""
    return Component(
        AutoencoderKL,
        {
            **VAE_SHAPE,
            "latent_channels": 16,
            "sample_size": 1024,
            "scaling_factor": scaling_factor,
            "shift_factor": shift_factor,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
        },
    )
