"""Wan image-to-video: Wan with the first frame, or the first and the last, as source images.

The source's latents and a mask of its frames are further channels of the transformer's input. Wan2.1 also takes
the tokens of a CLIP image encoder; Wan2.2 A14B has two transformers and no image encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.experts import parts_of
from digenrl.models.families.helpers import guided_velocity
from digenrl.models.families.wan import SCHEDULER_2_2, TEXT_LENGTH, WAN, WanModel, full_size
from digenrl.models.family import SourceCount

FRAMES, CLIP_TOKENS = "source_frames", "source_tokens"  # in the conditioning
CLIP_SHAPE = (257, 1280)  # of one image, in the published image encoder


class WanImageToVideoModel(WanModel):
    """L = (C, F, h, w), as in Wan. A prompt has one source, or two: the first and the last frame."""

    family = "wan_i2v"
    comfyui_layers = None
    vision_components = ("image_encoder", "image_processor")
    lora_targets = (*WanModel.lora_targets, "add_k_proj", "add_v_proj")
    text_length = None  # the transformer takes the last 512 tokens for text, and those before them for an image

    @property
    def text_tokens(self) -> int:
        return TEXT_LENGTH.default

    @classmethod
    def check_index(cls, index: Mapping[str, Any]) -> None:
        super().check_index(index)
        if index.get("expand_timesteps"):
            raise ConfigError(
                "model.source: Wan2.2-TI2V-5B from images is not supported; use Wan2.1-I2V, Wan2.1-FLF2V or "
                "Wan2.2-I2V-A14B, or model.family=wan for videos from text"
            )

    def source_arguments(self, images: Sequence[Image.Image], size: SampleSize) -> dict[str, Any]:
        return dict(zip(("image", "last_image"), images, strict=False))

    @torch.no_grad()
    def encode_with_images(
        self,
        prompts: Sequence[str],
        images: Sequence[Sequence[Image.Image]],
        size: SampleSize,
        negative_prompts: Sequence[str] | None = None,
    ) -> Conditioning:
        encoded = {FRAMES: torch.cat([self._encode_frames(own, size) for own in images])}
        if self.pipeline.image_encoder is not None:
            device = self.text_device()
            tokens = [self.pipeline.encode_image(list(own), device).flatten(0, 1)[None] for own in images]
            encoded[CLIP_TOKENS] = torch.cat(tokens)
        return replace(self.encode(prompts, negative_prompts), images=encoded)

    def _encode_frames(self, images: Sequence[Image.Image], size: SampleSize) -> Tensor:
        """A mask of the given frames, and the latents of a video that has no others."""
        device, processor = self.vae.device, self.pipeline.video_processor
        pixels = [processor.preprocess(image, height=size.height, width=size.width).to(device) for image in images]
        channels, unused = self.vae.config.z_dim, torch.zeros((), device=device)
        frames_1CFHW: Tensor = self.pipeline.prepare_latents(
            pixels[0],
            1,
            channels,
            size.height,
            size.width,
            size.frames,
            torch.float32,
            device,
            latents=unused,
            last_image=pixels[1] if len(pixels) > 1 else None,
        )[1]
        return frames_1CFHW

    def image_shapes(self, sources: Sequence[SampleSize], size: SampleSize) -> Mapping[str, tuple[int, ...]]:
        """Those of Wan2.1; Wan2.2 ignores the tokens of the image encoder."""
        channels, *grid = self.noise_shape(size)
        tokens, width = CLIP_SHAPE
        masks = self.pipeline.vae_scale_factor_temporal
        return {FRAMES: (channels + masks, *grid), CLIP_TOKENS: (tokens * len(sources), width)}

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """Without source images no frame is given: the further channels and the image's tokens are zero."""
        images, (channels, *grid) = conditioning.images, self.noise_shape(size)
        masks = self.pipeline.vae_scale_factor_temporal
        none = latents_BL.new_zeros(len(latents_BL), channels + masks, *grid)
        tokens = self._clip_tokens(images.get(CLIP_TOKENS), rows=len(latents_BL))
        return guided_velocity(
            self,
            latents_BL,
            timesteps_B,
            conditioning,
            guidance,
            channels_BL=images.get(FRAMES, none),
            shared=tokens,
        )

    def _clip_tokens(self, tokens_BTD: Tensor | None, rows: int) -> dict[str, Tensor]:
        """As the transformer takes them; one for first and last frames takes a row for each of the two."""
        config: Any = next(iter(parts_of(self.transformer).values())).config
        if config.image_dim is None:
            return {}
        of_both = config.pos_embed_seq_len
        if tokens_BTD is None:
            tokens_BTD = torch.zeros(rows, of_both or CLIP_SHAPE[0], config.image_dim, device=self.device)
        tokens = tokens_BTD.shape[1]
        if tokens == 2 * CLIP_SHAPE[0] if of_both is None else tokens != of_both:
            takes = "the first frame" if of_both is None else "the first and the last frame"
            raise ConfigError(
                f"{self.family}: this model takes {takes} of a clip, but a prompt has other source images; give "
                "every prompt these, or use Wan2.2-I2V-A14B, which takes one or both"
            )
        if of_both is not None:
            tokens_BTD = tokens_BTD.reshape(2 * len(tokens_BTD), -1, tokens_BTD.shape[2])
        return {"encoder_hidden_states_image": tokens_BTD}


IMAGE_CHANNELS = {"in_channels": 36}  # the sample's 16, the source's 16, and 4 of the mask
IMAGE_TOKENS = {**IMAGE_CHANNELS, "image_dim": CLIP_SHAPE[1], "added_kv_proj_dim": 5120}
SETTINGS_A14B = {"boundary_ratio": 0.9}

WAN_I2V = replace(
    WAN,
    pipeline_class=WanImageToVideoPipeline,
    model_class=WanImageToVideoModel,
    sizes={
        "2.1-14b": full_size("Wan2.1-I2V-14B-480P", *(16.39, 40, 40, 13824), shape=IMAGE_TOKENS),
        "2.1-flf2v-14b": replace(
            full_size(
                "Wan2.1-FLF2V-14B-720P",
                *(16.40, 40, 40, 13824),
                shape={**IMAGE_TOKENS, "pos_embed_seq_len": 2 * CLIP_SHAPE[0]},
                scheduler=SCHEDULER_2_2,
            ),
            hub_id="Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
        ),
        "2.2-a14b": full_size(
            "Wan2.2-I2V-A14B", *(28.58, 40, 40, 13824), shape=IMAGE_CHANNELS, pipeline_settings=SETTINGS_A14B
        ),
    },
    sources=SourceCount(1, 2),
)
