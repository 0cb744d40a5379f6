"""Qwen-Image: packed latents, Qwen2.5-VL text with a mask, classifier-free guidance that preserves the norm.

Shape legend as in `digenrl.models.contract`; here L = (S, 64) with S = (h / 2) * (w / 2) tokens; T = text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import Tensor
from torch.nn import functional

from digenrl.models.blocks import repeated_blocks
from digenrl.models.contract import SampleSize, Schedule, Text
from digenrl.models.families.parts.comfyui_layers import DIFFUSERS_NAMES
from digenrl.models.families.parts.helpers import (
    JOINT_ATTENTION,
    latent_height_width,
    pixels_of_videos,
    require_one_frame,
    scaled_video_latents,
    stretched_schedule,
    unscaled_video_latents,
)
from digenrl.models.families.parts.qwen_attention import JointAttention, RealRotations
from digenrl.models.family import Component, Family, FullSize
from digenrl.models.parallel.token_exchange import TokenShares
from digenrl.models.pipeline_model import TextLength, TwoBranchModel

TEXT_LENGTH = TextLength("tokenizer", default=512, most=1024)  # of a prompt; the pipeline's default and limit


class QwenImageModel(TwoBranchModel):
    """L = (S, 64). Text is stored at a fixed length with a mask; forwards drop unneeded padding."""

    family = "qwen_image"
    lora_targets = JOINT_ATTENTION
    comfyui_layers = DIFFUSERS_NAMES
    default_guidance = 4.0
    guidance_argument = "true_cfg_scale"
    text_encoders = ("text_encoder",)
    text_mask = "encoder_hidden_states_mask"
    text_length = TEXT_LENGTH
    self_attention = ("attn",)

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        if self.transformer is not None:
            self.transformer.pos_embed = RealRotations(pipeline.transformer.pos_embed)
            for block in repeated_blocks(self.transformer):
                block.attn.set_processor(JointAttention())  # type: ignore[union-attr,operator]

    def text_length_dims(self, arguments: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """The text, its rotary table and, if there is one, its mask."""
        mask_BT = arguments["encoder_hidden_states_mask"]
        return [
            (arguments["encoder_hidden_states"], 1),
            (arguments["image_rotary_emb"][1], 0),
            *([] if mask_BT is None else [(mask_BT, 1)]),
        ]

    def own_arguments(self, arguments: Mapping[str, Any], shares: TokenShares) -> dict[str, Any]:
        """The rotary tables and, if there are any, the mask of the text and the marks of source images."""
        image_table, text_table = arguments["image_rotary_emb"]
        mask_BT = arguments["encoder_hidden_states_mask"]
        index_BS = arguments.get("modulate_index")
        return {
            "modulate_index": None if index_BS is None else shares.own(index_BS, 1, "image"),
            "image_rotary_emb": (shares.own(image_table, 0, "image"), shares.own(text_table, 0, "text")),
            "encoder_hidden_states_mask": None if mask_BT is None else shares.own(mask_BT, 1, "text"),
        }

    def encode_side(self, prompts: list[str]) -> dict[str, Tensor | None]:
        text_BTD, mask_BT = self.whole_pipeline().encode_prompt(
            prompts, device=self.text_device(), max_sequence_length=self.text_tokens
        )
        if mask_BT is None:  # the pipeline returns None if no row is padded
            mask_BT = torch.ones(text_BTD.shape[:2], dtype=torch.long, device=text_BTD.device)
        padding = self.text_tokens - text_BTD.shape[1]
        return {
            "encoder_hidden_states": functional.pad(text_BTD, (0, 0, 0, padding)),
            "encoder_hidden_states_mask": functional.pad(mask_BT, (0, padding)),
        }

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        _, h, w = self.noise_shape(size)
        return stretched_schedule(self, steps, tokens=(h // 2) * (w // 2), default_max_shift=1.15)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        require_one_frame(size, self.family)
        h, w = latent_height_width(size, self.pipeline.vae_scale_factor)
        return self.vae.config.z_dim, h, w

    def initial_latents(self, noise_B: Tensor, size: SampleSize) -> Tensor:
        """The noise, packed: each 2 x 2 patch becomes a token of 64 numbers."""
        return self._packed(noise_B).to(self.device)

    def guided(self, conditional_BL: Tensor, unconditional_BL: Tensor, guidance: float) -> Tensor:
        """The velocity of every token is rescaled to the norm that it has without guidance."""
        combined_BL = super().guided(conditional_BL, unconditional_BL, guidance)
        norm = torch.norm(conditional_BL, dim=-1, keepdim=True)
        guided_norm = torch.norm(combined_BL, dim=-1, keepdim=True)
        rescaled_BL: Tensor = combined_BL * (norm / guided_norm)
        return rescaled_BL

    def branch(
        self, latents_BL: Tensor, timesteps_B: Tensor, text: Text, images: Mapping[str, Tensor], size: SampleSize
    ) -> Tensor:
        """The output for the sample's tokens. Tokens of source images, if there are any, follow them."""
        _, h, w = self.noise_shape(size)
        sources = list(images.values())
        tokens_BL = torch.cat([latents_BL, *(self._packed(each).to(latents_BL) for each in sources)], dim=1)
        sizes = [(h, w), *(source.shape[2:] for source in sources)]
        shapes = [(1, rows // 2, columns // 2) for rows, columns in sizes]
        text_BTD, mask_BT = text["encoder_hidden_states"], text["encoder_hidden_states_mask"]
        assert text_BTD is not None, "the transformer's text is never optional"
        velocity_BL: Tensor = self.transformer(
            hidden_states=tokens_BL.to(self.dtype),
            timestep=timesteps_B.to(latents_BL.device, self.dtype) / 1000,
            encoder_hidden_states=text_BTD.to(self.dtype),
            encoder_hidden_states_mask=mask_BT,
            img_shapes=[shapes] * len(latents_BL),
            guidance=None,
            return_dict=False,
        )[0]
        return velocity_BL[:, : latents_BL.shape[1]]

    def _packed(self, latents_BCHW: Tensor) -> Tensor:
        packed_BL: Tensor = self.pipeline._pack_latents(latents_BCHW, *latents_BCHW.shape)
        return packed_BL

    @torch.no_grad()
    def encode_pixels(self, pixels_BFCHW: Tensor) -> Tensor:
        inputs_BCFHW = 2 * pixels_BFCHW.transpose(1, 2).to(self.vae.device, self.vae.dtype) - 1
        latents_BCFHW = unscaled_video_latents(self.vae, self.vae.encode(inputs_BCFHW).latent_dist.mode())
        return self._packed(latents_BCFHW.squeeze(2))

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        latents_BCFHW = self.pipeline._unpack_latents(
            latents_BL, size.height, size.width, self.pipeline.vae_scale_factor
        )
        scaled_BCFHW = scaled_video_latents(self.vae, latents_BCFHW)
        return pixels_of_videos(self.vae.decode(scaled_BCFHW, return_dict=False)[0])


# mu rises from .5 at 256 tokens to .9 at 8192; the last sigma before 0 is always .02.
SCHEDULER = Component(
    FlowMatchEulerDiscreteScheduler,
    {
        "use_dynamic_shifting": True,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "shift_terminal": 0.02,
    },
)


QWEN_IMAGE = Family(
    kind="image",
    pipeline_class=QwenImagePipeline,
    model_class=QwenImageModel,
    sizes={
        "20b": FullSize(
            billions=20.43,
            transformer=Component(QwenImageTransformer2DModel, {}),  # the class's defaults: the published model
            text_shapes={
                "encoder_hidden_states": (TEXT_LENGTH.default, 3584),
                "encoder_hidden_states_mask": (TEXT_LENGTH.default,),
            },
            hub_id="Qwen/Qwen-Image",
        ),
    },
    vae=Component(AutoencoderKLQwenImage, {}),
    scheduler=SCHEDULER,
    uses_negative_prompts=True,
)
