"""FLUX.1-Kontext: FLUX.1 that edits a source image, whose latents follow the sample's in the token sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers import FluxKontextPipeline
from PIL import Image
from torch import Tensor

from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.families.flux import FLUX, FluxModel, image_positions
from digenrl.models.families.parts.helpers import source_name, vae_inputs
from digenrl.models.family import SourceCount

SOURCE = source_name(0)


class FluxKontextModel(FluxModel):
    """L as in FLUX.1. The source is kept as latents (C, h, w), and packed in each forward."""

    family = "flux_kontext"
    default_guidance = 2.5
    sources_are_tokens = True
    unused_components = ("image_encoder", "feature_extractor")  # of IP adapters

    def source_arguments(self, images: Sequence[Image.Image], size: SampleSize) -> dict[str, Any]:
        (image,) = images
        return {"image": image, "max_area": size.height * size.width, "_auto_resize": False}

    @torch.no_grad()
    def encode_with_images(
        self,
        prompts: Sequence[str],
        images: Sequence[Sequence[Image.Image]],
        size: SampleSize,
        negative_prompts: Sequence[str] | None = None,
    ) -> Conditioning:
        pixels = torch.cat([vae_inputs(self.pipeline.image_processor, image) for (image,) in images])
        latents_BCHW: Tensor = self.pipeline._encode_vae_image(pixels.to(self.vae.device, self.vae.dtype), None)
        return replace(self.encode(prompts, negative_prompts), images={SOURCE: latents_BCHW})

    def image_shapes(self, sources: Sequence[SampleSize], size: SampleSize) -> Mapping[str, tuple[int, ...]]:
        return {source_name(index): self.noise_shape(source) for index, source in enumerate(sources)}

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """As FLUX.1's, of the sample's tokens. The source's have the same positions, on another plane."""
        if not conditioning.images:
            return super().velocity(latents_BL, timesteps_B, conditioning, guidance, size)
        source_BCHW = conditioning.images[SOURCE].to(latents_BL.device, self.dtype)
        source_BL = self._packed(source_BCHW)
        _, h, w = self.noise_shape(size)
        source_h, source_w = source_BCHW.shape[2:]
        own = image_positions(h // 2, w // 2, latents_BL.device, self.dtype)
        other = image_positions(source_h // 2, source_w // 2, latents_BL.device, self.dtype).clone()
        other[:, 0] = 1
        positions = torch.cat([own, other])
        tokens_BL = torch.cat([latents_BL.to(self.dtype), source_BL], dim=1)
        velocity_BL = self._forward(tokens_BL, timesteps_B, conditioning.positive, guidance, positions)
        return velocity_BL[:, : latents_BL.shape[1]]


FLUX_KONTEXT = replace(
    FLUX,
    pipeline_class=FluxKontextPipeline,
    model_class=FluxKontextModel,
    sizes={"1-dev": replace(FLUX.sizes["1-dev"], hub_id="black-forest-labs/FLUX.1-Kontext-dev")},
    distilled=(),
    sources=SourceCount(1, 1),
)
