"""HunyuanVideo 1.5 from text: latents (32, F, h, w), Qwen2.5-VL text, ByT5 glyphs, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from torch import Tensor
from torch.nn.functional import pad

from digenrl.models.blocks import repeated_blocks
from digenrl.models.contract import Conditioning, SampleSize, Schedule
from digenrl.models.families.helpers import (
    JOINT_ATTENTION,
    Text,
    at_least_fp32,
    latent_frames_height_width,
    negative_side,
    paired_negatives,
    pixels_of_videos,
    text_like,
)
from digenrl.models.families.hunyuan_attention import VideoThenText, text_to_video_forward
from digenrl.models.family import Component, Family, FullSize
from digenrl.models.pipeline_model import PipelineModel, TextLength, schedule_of

TEXT_LENGTH = TextLength("tokenizer", default=1000, most=1000)  # of Qwen2.5-VL, after the template
GLYPH_TOKENS = 256  # of ByT5, for texts in quotation marks


class HunyuanVideo15Model(PipelineModel):
    """L = (C, F, h, w), where one latent is a token of 16 x 16 pixels.

    The text of a row is its glyphs and then its words, padded at the end. Its mask has 1 for a word, 2 for a glyph
    and 0 for padding; the states of glyphs are padded to the width of words.
    """

    family = "hunyuan_video_1_5"
    block_state_arguments = ("hidden_states", "encoder_hidden_states")
    lora_targets = JOINT_ATTENTION
    default_guidance = 6.0
    text_encoders = ("text_encoder", "text_encoder_2")
    text_mask = "encoder_attention_mask"
    text_length = TEXT_LENGTH
    unused_by_encoders = ()  # the pipeline's constructor reads the configuration of the VAE

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        if self.vae is not None:
            self.vae.enable_slicing()  # it decodes one sample at a time only
        if self.transformer is not None:
            self.transformer.forward = MethodType(text_to_video_forward, self.transformer)
            for block in repeated_blocks(self.transformer):
                block.attn.set_processor(VideoThenText())  # type: ignore[union-attr,operator]

    def pipeline_arguments(self, guidance: float) -> dict[str, Any]:
        return {}

    def prepare_pipeline(self, pipeline: Any, guidance: float) -> None:
        pipeline.guider = pipeline.guider.new(guidance_scale=max(guidance, 1.0))
        pipeline.tokenizer_max_length = self.text_tokens
        pipeline.vae.enable_slicing()

    def text_length_dims(self, arguments: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        mask = arguments["attention_mask"]
        return [(arguments["encoder_hidden_states"], 1), *([] if mask is None else [(mask, 1)])]

    def compact(self, conditioning: Conditioning) -> Conditioning:
        """As of all families, except that a mask with glyphs stays: it tells them from words."""
        cut = super().compact(conditioning)

        def side(own: Text, cut: Text) -> Text:
            mask_BT, text_BTD = own[self.text_mask], cut["encoder_hidden_states"]
            if mask_BT is None or text_BTD is None or cut[self.text_mask] is not None or not (mask_BT == 2).any():
                return cut
            return {**cut, self.text_mask: mask_BT[:, : text_BTD.shape[1]]}

        negative, cut_negative = conditioning.negative, cut.negative
        return Conditioning(
            side(conditioning.positive, cut.positive),
            None if negative is None or cut_negative is None else side(negative, cut_negative),
        )

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        return Conditioning(
            self._encode_side(list(prompts)), self._encode_side(paired_negatives(prompts, negative_prompts))
        )

    def _encode_side(self, prompts: list[str]) -> Text:
        device = self.text_device()
        self.pipeline.tokenizer_max_length = self.text_tokens
        words_BTD, word_mask_BT, glyphs_BTD, glyph_mask_BT = self.pipeline.encode_prompt(
            prompts, device=device, batch_size=len(prompts)
        )
        glyphs_BTD = pad(glyphs_BTD, (0, words_BTD.shape[2] - glyphs_BTD.shape[2]))
        mask_BT = torch.cat([2 * glyph_mask_BT, word_mask_BT], dim=1)
        order_BT = (mask_BT == 0).int().argsort(dim=1, stable=True)  # padding last
        text_BTD = torch.cat([glyphs_BTD, words_BTD], dim=1)
        return {
            "encoder_hidden_states": text_BTD.gather(1, order_BT[..., None].expand_as(text_BTD)),
            self.text_mask: mask_BT.gather(1, order_BT),
        }

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """Evenly spaced sigmas from 1, shifted by the scheduler's fixed amount."""
        scheduler = self.fresh_scheduler()
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
        return schedule_of(scheduler)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        frames_per_latent = self.pipeline.vae_scale_factor_temporal
        pixels_per_latent = self.pipeline.vae_scale_factor_spatial
        grid = latent_frames_height_width(size, frames_per_latent, pixels_per_latent, patch=1)
        return self.vae.config.latent_channels, *grid

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """The branches are separate forwards, as in the diffusers pipeline; their texts differ in length."""
        conditioning = self.compact(conditioning)
        conditional_BL = self._forward(latents_BL, timesteps_B, conditioning.positive)
        if guidance <= 1:
            return at_least_fp32(conditional_BL)
        unconditional_BL = self._forward(latents_BL, timesteps_B, negative_side(conditioning))
        return at_least_fp32(unconditional_BL + guidance * (conditional_BL - unconditional_BL))

    def _forward(self, latents_BL: Tensor, timesteps_B: Tensor, text: Text) -> Tensor:
        latents_BL = latents_BL.to(self.dtype)
        without_image = latents_BL.new_zeros(len(latents_BL), latents_BL.shape[1] + 1, *latents_BL.shape[2:])
        velocity_BL: Tensor = self.transformer(
            hidden_states=torch.cat([latents_BL, without_image], dim=1),
            timestep=timesteps_B.to(latents_BL),
            **text_like(text, latents_BL),
        )[0]
        return velocity_BL

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        latents_BL = latents_BL.to(self.vae.dtype) / self.vae.config.scaling_factor
        return pixels_of_videos(self.vae.decode(latents_BL, return_dict=False)[0])


SCHEDULER = Component(FlowMatchEulerDiscreteScheduler, {"shift": 5.0})  # for 480p

HUNYUAN_VIDEO_1_5 = Family(
    kind="video",
    pipeline_class=HunyuanVideo15Pipeline,
    model_class=HunyuanVideo15Model,
    sizes={
        "8b": FullSize(
            billions=8.33,
            transformer=Component(HunyuanVideo15Transformer3DModel, {"task_type": "t2v"}),
            text_shapes={
                "encoder_hidden_states": (TEXT_LENGTH.default + GLYPH_TOKENS, 3584),
                "encoder_attention_mask": (TEXT_LENGTH.default + GLYPH_TOKENS,),
            },
            hub_id="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        ),
    },
    vae=Component(AutoencoderKLHunyuanVideo15, {}),  # the class's defaults: the published VAE
    scheduler=SCHEDULER,
    uses_negative_prompts=True,
)
