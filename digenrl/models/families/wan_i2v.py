"""Wan image-to-video: Wan with the first frame, or the first and the last, as source images.

The source's latents and a mask of its frames are further channels of the transformer's input. Wan2.1 also takes
the tokens of a CLIP image encoder; Wan2.2 A14B has two transformers and no image encoder. Wan2.2 5B has no further
channels: it takes the first frame in place of the sample's, at timestep 0.
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
from digenrl.models.contract import Conditioning, SampleSize, Schedule
from digenrl.models.experts import parts_of
from digenrl.models.families.parts.helpers import guided_velocity
from digenrl.models.families.wan import SCHEDULER_2_2, TEXT_LENGTH, WAN, WanModel, full_size
from digenrl.models.family import SourceCount
from digenrl.models.parallel.token_exchange import TokenShares
from digenrl.models.pipeline_model import TRAINED_TIMESTEPS

FRAMES, CLIP_TOKENS = "source_frames", "source_tokens"  # in the conditioning
CLIP_SHAPE = (257, 1280)  # of one image, in the published image encoder


class WanImageToVideoModel(WanModel):
    """L = (C, F, h, w), as in Wan. A prompt has one source, or two: the first and the last frame."""

    family = "wan_i2v"
    vision_components = ("image_encoder", "image_processor")
    lora_targets = (*WanModel.lora_targets, "add_k_proj", "add_v_proj")
    text_length = None  # the transformer takes the last 512 tokens for text, and those before them for an image

    @property
    def text_tokens(self) -> int:
        return TEXT_LENGTH.default

    @property
    def _replaces_first_frame(self) -> bool:
        return bool(self.pipeline.config.expand_timesteps)

    def own_arguments(self, arguments: Mapping[str, Any], shares: TokenShares) -> dict[str, Any]:
        """The rotary tables, and the timesteps if every token has its own."""
        own, times = super().own_arguments(arguments, shares), arguments["temb"]
        return own if times.ndim == 3 else {**own, "temb": shares.own(times, 1, "image")}

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        return self._with_fractions(super().schedule(steps, size))

    def shifted_schedule(self, steps: int, shift: float) -> Schedule:
        return self._with_fractions(super().shifted_schedule(steps, shift))

    def _with_fractions(self, schedule: Schedule) -> Schedule:
        """With the fractions that UniPC cuts off timesteps, if they are needed to know the noise level again."""
        if not self._replaces_first_frame:
            return schedule
        whole, exact = schedule.timesteps, schedule.sigmas[:-1] * TRAINED_TIMESTEPS
        return replace(schedule, timesteps=exact.clamp(whole, torch.nextafter(whole + 1, whole)))

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
        if self._replaces_first_frame and any(len(own) > 1 for own in images):
            raise ConfigError(
                f"{self.family}: Wan2.2-TI2V-5B takes the first frame of a clip, but a prompt has "
                f"{max(map(len, images))} source images; give one per prompt, or use Wan2.2-I2V-A14B"
            )
        encoded = {FRAMES: torch.cat([self._encode_frames(own, size) for own in images])}
        if self.pipeline.image_encoder is not None:
            device = self.text_device()
            tokens = [self.pipeline.encode_image(list(own), device).flatten(0, 1)[None] for own in images]
            encoded[CLIP_TOKENS] = torch.cat(tokens)
        return replace(self.encode(prompts, negative_prompts), images=encoded)

    def _encode_frames(self, images: Sequence[Image.Image], size: SampleSize) -> Tensor:
        """A mask of the given frames, and the latents of a video that has no others; of Wan2.2 5B, one frame."""
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
        if self._replaces_first_frame:
            return {FRAMES: (channels, 1, *grid[1:])}
        tokens, width = self._clip_shape
        masks = self.pipeline.vae_scale_factor_temporal
        return {FRAMES: (channels + masks, *grid), CLIP_TOKENS: (tokens * len(sources), width)}

    @property
    def _clip_shape(self) -> tuple[int, int]:
        """The tokens of one image and their width, as the transformer takes them if it says so."""
        if self.transformer is None:
            return CLIP_SHAPE
        config: Any = next(iter(parts_of(self.transformer).values())).config
        of_both = config.pos_embed_seq_len
        return CLIP_SHAPE[0] if of_both is None else of_both // 2, config.image_dim or CLIP_SHAPE[1]

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """Without source images no frame is given: the further channels and the image's tokens are zero."""
        if self._replaces_first_frame:
            return self._velocity_after_frame(latents_BL, timesteps_B, conditioning, guidance)
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

    def _velocity_after_frame(
        self, latents_BL: Tensor, timesteps_B: Tensor, conditioning: Conditioning, guidance: float
    ) -> Tensor:
        """Tokens of the given frame are at timestep 0, and its own velocity leads to it from any latents."""
        frame_BC1HW, levels_B = (
            conditioning.images.get(FRAMES),
            timesteps_B.to(latents_BL.device) / TRAINED_TIMESTEPS,
        )
        if frame_BC1HW is None:
            return guided_velocity(self, latents_BL, timesteps_B.floor(), conditioning, guidance)
        frame_BC1HW = frame_BC1HW.to(latents_BL)
        times_BFHW = timesteps_B.floor().view(-1, 1, 1, 1).repeat(1, *latents_BL[0, 0, :, ::2, ::2].shape)
        times_BFHW[:, 0] = 0
        given_BL = torch.cat([frame_BC1HW, latents_BL[:, :, 1:]], dim=2)
        velocity_BL = guided_velocity(self, given_BL, times_BFHW.flatten(1), conditioning, guidance)
        to_frame_BC1HW = (latents_BL[:, :, :1] - frame_BC1HW) / levels_B.view(-1, 1, 1, 1, 1)
        return torch.cat([to_frame_BC1HW.to(velocity_BL), velocity_BL[:, :, 1:]], dim=2)

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


def own_sources(transformer: Mapping[str, Any], pipeline: Mapping[str, Any]) -> SourceCount:
    """Wan2.1 FLF2V takes the first and the last frame, other Wan2.1 and Wan2.2 5B the first, A14B one or both."""
    if transformer.get("pos_embed_seq_len") is not None:
        return SourceCount(2, 2)
    only_first = transformer.get("image_dim") is not None or pipeline.get("expand_timesteps")
    return SourceCount(1, 1 if only_first else 2)


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
        "2.2-5b": WAN.sizes["2.2-5b"],
    },
    sources=SourceCount(1, 2),
    own_sources=own_sources,
)
