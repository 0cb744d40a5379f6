"""HunyuanVideo 1.5 from a first frame.

The frame's latents and a mask of its frames are further channels, and its SigLIP tokens precede the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline
from PIL import Image
from torch import Tensor

from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.families.hunyuan_video_1_5 import (
    FIRST_FRAME,
    HUNYUAN_VIDEO_1_5,
    IMAGE_TOKENS,
    HunyuanVideo15Model,
)
from digenrl.models.family import Component, SourceCount

SIGLIP_TOKENS = 729  # of one image, in the published image encoder


class HunyuanVideo15ImageToVideoModel(HunyuanVideo15Model):
    """L = (C, F, h, w), as from text. A prompt has one source, the first frame."""

    family = "hunyuan_video_1_5_i2v"
    vision_components = ("image_encoder", "feature_extractor")
    tokens_beside_text = SIGLIP_TOKENS

    def source_arguments(self, images: Sequence[Image.Image], size: SampleSize) -> dict[str, Any]:
        (image,) = images
        return {"image": image}

    def sample_arguments(self, latents_BL: Tensor, size: SampleSize) -> dict[str, Any]:
        return {"latents": latents_BL}

    def prepare_pipeline(self, pipeline: Any, guidance: float, size: SampleSize) -> None:
        """The pipeline would choose a size by the proportions of the source."""
        super().prepare_pipeline(pipeline, guidance, size)
        pipeline.video_processor.calculate_default_height_width = lambda **_: (size.height, size.width)

    @torch.no_grad()
    def encode_with_images(
        self,
        prompts: Sequence[str],
        images: Sequence[Sequence[Image.Image]],
        size: SampleSize,
        negative_prompts: Sequence[str] | None = None,
    ) -> Conditioning:
        resize = self.pipeline.video_processor.resize
        frames = [resize(image, size.height, size.width, resize_mode="crop") for (image,) in images]
        encoded = {
            FIRST_FRAME: torch.cat([self._encode_frame(frame, size) for frame in frames]),
            IMAGE_TOKENS: torch.cat([self._encode_tokens(frame) for frame in frames]),
        }
        return replace(self.encode(prompts, negative_prompts), images=encoded)

    def _encode_frame(self, frame: Image.Image, size: SampleSize) -> Tensor:
        latents_1C1HW: Tensor = self.pipeline._get_image_latents(
            self.vae, self.pipeline.video_processor, frame, size.height, size.width, self.vae.device
        )
        return latents_1C1HW

    def _encode_tokens(self, frame: Image.Image) -> Tensor:
        tokens_1TD: Tensor = self.pipeline.encode_image(
            frame, batch_size=1, device=self.text_device(), dtype=self.pipeline.image_encoder.dtype
        )
        return tokens_1TD

    def image_shapes(self, sources: Sequence[SampleSize], size: SampleSize) -> Mapping[str, tuple[int, ...]]:
        channels, _, *grid = self.noise_shape(size)
        tokens = SIGLIP_TOKENS, self.pipeline.vision_states_dim
        return {FIRST_FRAME: (channels, 1, *grid), IMAGE_TOKENS: tokens}


(TEXT_TO_VIDEO,) = HUNYUAN_VIDEO_1_5.sizes.values()

HUNYUAN_VIDEO_1_5_I2V = replace(
    HUNYUAN_VIDEO_1_5,
    pipeline_class=HunyuanVideo15ImageToVideoPipeline,
    model_class=HunyuanVideo15ImageToVideoModel,
    sizes={
        "8b": replace(
            TEXT_TO_VIDEO,
            transformer=Component(TEXT_TO_VIDEO.transformer.cls, {}),  # the class's defaults: the published model
            hub_id="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
        ),
    },
    sources=SourceCount(1, 1),
)
