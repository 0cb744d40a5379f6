"""Qwen-Image 2.1 from text: one stream of text and image tokens, Qwen3-VL text, an image with transparency.

Shape legend as in `digenrl.models.contract`; S = image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from torch import Tensor
from torch.nn.functional import pad

from digenrl.config.reading import ConfigError
from digenrl.models.blocks import repeated_blocks
from digenrl.models.contract import Conditioning, SampleSize, Schedule, Text
from digenrl.models.families.parts.comfyui_layers import DIFFUSERS_NAMES
from digenrl.models.families.parts.helpers import (
    latent_height_width,
    pixels_of_videos,
    require_one_frame,
    scaled_video_latents,
    stretched_schedule,
    unscaled_video_latents,
)
from digenrl.models.families.parts.qwen_stream import (
    QwenImage21Pipeline,
    RowPositions,
    TextProcessor,
    TextThenImage,
    stream_forward,
)
from digenrl.models.families.qwen_image import SCHEDULER
from digenrl.models.family import Component, Distilled, Family, FullSize
from digenrl.models.pipeline_model import TextLength, TwoBranchModel

TEXT_LENGTH = TextLength("processor", default=512, most=1024)  # with the end of the chat template


class QwenImage21Model(TwoBranchModel):
    """L = (S, 64). Text is stored at a fixed length with a mask; forwards drop unneeded padding.

    The VAE decodes red, green, blue and opacity. Samples are shown on white.
    """

    family = "qwen_image_2_1"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    comfyui_layers = DIFFUSERS_NAMES
    default_guidance = 1.0  # it is meant to be sampled without
    guidance_argument = "true_cfg_scale"
    block_state_arguments = ("hidden_states",)
    text_encoders = ("text_encoder",)
    vision_components = ("processor",)
    processors = ("processor",)
    text_mask = "encoder_hidden_states_mask"
    text_length = TEXT_LENGTH

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        if self.transformer is not None:
            self.transformer.pos_embed = RowPositions(pipeline.transformer.pos_embed.freqs)
            self.transformer.forward = MethodType(stream_forward, self.transformer)
            for block in repeated_blocks(self.transformer):
                block.attn.set_processor(TextThenImage())  # type: ignore[union-attr,operator]

    def check_denoising(self) -> None:
        super().check_denoising()
        if not self.pipeline.transformer.config.causal_condition:
            raise ConfigError(
                f"{self.family}: the transformer's text depends on the timestep (`causal_condition: false`), "
                "which is not supported"
            )

    def own_components(self) -> dict[str, Any]:
        """The processor, and what the pipeline remembers of it: how many tokens the system message has."""
        tokenizer = self.pipeline.processor
        if tokenizer is None:
            return {}
        system = self.pipeline.prompt_template_t2i.split("<|im_start|>user")[0]
        return {"processor": TextProcessor(tokenizer), "_drop_idx": len(tokenizer(system).input_ids)}

    def pipeline_arguments(self, guidance: float) -> dict[str, Any]:
        return {self.guidance_argument: guidance}

    def text_length_dims(self, arguments: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """All tokens, their rotary tables, the marks of image tokens and, if there is one, the mask."""
        mask_BT = arguments["key_valid"]
        return [
            (arguments["hidden_states"], 1),
            (arguments["rotary_emb"], 1),
            (arguments["target_token_mask"], 0),
            *([] if mask_BT is None else [(mask_BT, 1)]),
        ]

    def encode_side(self, prompts: list[str]) -> Text:
        return Conditioning.joined([Conditioning(self._encode_text(prompt)) for prompt in prompts]).positive

    def _encode_text(self, prompt: str) -> Text:
        text_1TD, _, _ = self.whole_pipeline().encode_prompt([prompt], device=self.text_device())
        text_1TD = text_1TD[:, : self.text_tokens]
        mask_1T = torch.ones(text_1TD.shape[:2], dtype=torch.long, device=text_1TD.device)
        padding = self.text_tokens - text_1TD.shape[1]
        return {
            "encoder_hidden_states": pad(text_1TD, (0, 0, 0, padding)),
            self.text_mask: pad(mask_1T, (0, padding)),
        }

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """With a token for every latent."""
        _, h, w = self.noise_shape(size)
        return stretched_schedule(self, steps, h * w, default_max_shift=1.15, sigmas=self._sigmas(steps))

    def step_arguments(self, steps: int) -> dict[str, Any]:
        sigmas = self._sigmas(steps)
        return super().step_arguments(steps) | ({} if sigmas is None else {"sigmas": sigmas})

    def _sigmas(self, steps: int) -> list[float] | None:
        """Those that the pipeline sets, as Turbo's, interpolated for another number of steps; None if none."""
        own: list[float] | None = self.pipeline.config.sample_sigmas
        if own is None or len(own) == steps:
            return own
        places = np.linspace(0.0, 1.0, steps + 1)[:-1]
        return [float(each) for each in np.interp(places, np.linspace(0.0, 1.0, len(own) + 1), [*own, 0.0])]

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        require_one_frame(size, self.family)
        return self.vae.config.z_dim, *latent_height_width(size, self.pipeline.vae_scale_factor)

    def initial_latents(self, noise_B: Tensor, size: SampleSize) -> Tensor:
        """The noise, with a token for every latent."""
        return noise_B.flatten(2).transpose(1, 2).to(self.device)

    def branch(
        self, latents_BL: Tensor, timesteps_B: Tensor, text: Text, images: Mapping[str, Tensor], size: SampleSize
    ) -> Tensor:
        _, h, w = self.noise_shape(size)
        text_BTD = text["encoder_hidden_states"]
        assert text_BTD is not None, "the transformer's text is never optional"
        velocity_BL: Tensor = self.transformer(
            latents_BL.to(self.dtype),
            timesteps_B.to(latents_BL.device, self.dtype) / 1000,
            text_BTD.to(latents_BL.device, self.dtype),
            text[self.text_mask],
            (h, w),
        )[0]
        return velocity_BL

    @torch.no_grad()
    def encode_pixels(self, pixels_BFCHW: Tensor) -> Tensor:
        """Given images are opaque."""
        colors_BCFHW = pixels_BFCHW.transpose(1, 2).to(self.vae.device, self.vae.dtype)
        inputs_BPFHW = 2 * torch.cat([colors_BCFHW, torch.ones_like(colors_BCFHW[:, :1])], dim=1) - 1
        latents_BCFHW = unscaled_video_latents(self.vae, self.vae.encode(inputs_BPFHW).latent_dist.mode())
        return latents_BCFHW.flatten(2).transpose(1, 2)

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        _, h, w = self.noise_shape(size)
        latents_BCFHW = latents_BL.transpose(1, 2).reshape(len(latents_BL), -1, 1, h, w)
        scaled_BCFHW = scaled_video_latents(self.vae, latents_BCFHW)
        return on_white(pixels_of_videos(self.vae.decode(scaled_BCFHW, return_dict=False)[0]))


def on_white(pixels_BFPHW: Tensor) -> Tensor:
    """Pixels with an opacity as their fourth channel, on white."""
    colors, opacity = pixels_BFPHW[:, :, :3], pixels_BFPHW[:, :, 3:]
    return colors * opacity + (1 - opacity)


QWEN_IMAGE_2_1 = Family(
    kind="image",
    pipeline_class=QwenImage21Pipeline,
    model_class=QwenImage21Model,
    sizes={
        "7b": FullSize(
            billions=7.12,
            transformer=Component(QwenImage21Transformer2DModel, {}),  # the class's defaults: the published model
            text_shapes={
                "encoder_hidden_states": (TEXT_LENGTH.default, 4096),
                "encoder_hidden_states_mask": (TEXT_LENGTH.default,),
            },
            hub_id="Qwen/Qwen-Image-2.1",
        ),
    },
    vae=Component(AutoencoderKLQwenImage21, {}),
    scheduler=SCHEDULER,
    uses_negative_prompts=True,
    distilled=(Distilled("Qwen-Image-2.1-Turbo", steps=8, guidance=1.0),),
)
