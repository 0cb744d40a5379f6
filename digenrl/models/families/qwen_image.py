"""Qwen-Image: packed latents, Qwen2.5-VL text with a mask, true classifier-free guidance with a rescaled norm.

Shape legend as in `digenrl.models.contract`; here L = (S, 64) with S = (h / 2) * (w / 2) tokens; T = text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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
from digenrl.models.contract import Conditioning, SampleSize, Schedule
from digenrl.models.families.qwen_attention import JointAttention, RealRotations
from digenrl.models.families.video_helpers import pixels_of_videos, vae_latents
from digenrl.models.family import Family, FullSize, Part
from digenrl.models.loading import pipeline_without
from digenrl.models.pipeline_model import (
    PipelineModel,
    at_least_fp32,
    latent_height_width,
    negative_side,
    paired_negatives,
    require_one_frame,
    schedule_of,
    shift_from_tokens,
)
from digenrl.models.tiny import seeded_weights
from digenrl.models.tiny_video import tiny_qwen_text_encoder, tiny_qwen_tokenizer

TEXT_LENGTH = 512  # tokens of a prompt, the pipeline's own default


class QwenImageModel(PipelineModel):
    """L = (S, 64). Text is kept at one length, with a mask; a forward takes no more of it than its rows have."""

    family = "qwen_image"
    lora_targets = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
    default_guidance = 4.0
    text_encoders = ("text_encoder",)
    text_mask = "encoder_hidden_states_mask"

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        if self.transformer is not None:
            self.transformer.pos_embed = RealRotations(pipeline.transformer.pos_embed)
            for block in repeated_blocks(self.transformer):
                block.attn.set_processor(JointAttention())  # type: ignore[union-attr,operator]

    def dimensions_of_text(self, arguments: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """The text, its rotary table and, where it has one, its mask."""
        mask_BT = arguments["encoder_hidden_states_mask"]
        return [
            (arguments["encoder_hidden_states"], 1),
            (arguments["image_rotary_emb"][1], 0),
            *([] if mask_BT is None else [(mask_BT, 1)]),
        ]

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        """Both branches, each as the pipeline encodes it, padded to TEXT_LENGTH with a mask."""
        return Conditioning(
            self._encode_side(list(prompts)),
            self._encode_side(paired_negatives(prompts, negative_prompts)),
        )

    def _encode_side(self, prompts: list[str]) -> dict[str, Tensor | None]:
        text_BTD, mask_BT = self.pipeline.encode_prompt(
            prompts, device=self.text_device(), max_sequence_length=TEXT_LENGTH
        )
        if mask_BT is None:  # how the pipeline says that no row is padded
            mask_BT = torch.ones(text_BTD.shape[:2], dtype=torch.long, device=text_BTD.device)
        padding = TEXT_LENGTH - text_BTD.shape[1]
        return {
            "encoder_hidden_states": functional.pad(text_BTD, (0, 0, 0, padding)),
            "encoder_hidden_states_mask": functional.pad(mask_BT, (0, padding)),
        }

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """Even levels from 1, shifted by the number of tokens and stretched to the scheduler's terminal value."""
        _, h, w = self.noise_shape(size)
        scheduler = self.fresh_scheduler()
        shift = shift_from_tokens(scheduler.config, tokens=(h // 2) * (w // 2), default_max_shift=1.15)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift)
        return schedule_of(scheduler)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        """(16, h, w)."""
        require_one_frame(size, self.family)
        h, w = latent_height_width(size, self.pipeline.vae_scale_factor)
        return self.vae.config.z_dim, h, w

    def initial_latents(self, noise_B: Tensor, size: SampleSize) -> Tensor:
        """2 x 2 latent cells become one token of 64 numbers."""
        channels, h, w = self.noise_shape(size)
        packed_BL: Tensor = self.pipeline._pack_latents(noise_B, len(noise_B), channels, h, w)
        return packed_BL.to(self.device)

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """v of every row. With guidance, every token's combined v is scaled back to the length it has without.

        The branches are two forwards: their texts have lengths of their own, and one batch would need a mask.
        """
        conditioning = self.compact(conditioning)
        conditional_BL = self._forward(latents_BL, timesteps_B, conditioning.positive, size)
        if guidance <= 1:
            return at_least_fp32(conditional_BL)
        unconditional_BL = self._forward(latents_BL, timesteps_B, negative_side(conditioning), size)
        combined_BL = unconditional_BL + guidance * (conditional_BL - unconditional_BL)
        wanted_length = torch.norm(conditional_BL, dim=-1, keepdim=True)
        length = torch.norm(combined_BL, dim=-1, keepdim=True)
        return at_least_fp32(combined_BL * (wanted_length / length))

    def _forward(
        self, latents_BL: Tensor, timesteps_B: Tensor, text: Mapping[str, Tensor | None], size: SampleSize
    ) -> Tensor:
        _, h, w = self.noise_shape(size)
        text_BTD, mask_BT = text["encoder_hidden_states"], text["encoder_hidden_states_mask"]
        assert text_BTD is not None, "a transformer's text is never optional"
        velocity_BL: Tensor = self.transformer(
            hidden_states=latents_BL.to(self.dtype),
            timestep=timesteps_B.to(latents_BL.device) / 1000,
            encoder_hidden_states=text_BTD.to(self.dtype),
            encoder_hidden_states_mask=mask_BT,
            img_shapes=[[(1, h // 2, w // 2)]] * len(latents_BL),
            guidance=None,
            return_dict=False,
        )[0]
        return velocity_BL

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        """Pixels in [0, 1], fp32: (B, 1, 3, height, width)."""
        latents_BCFHW = self.pipeline._unpack_latents(
            latents_BL, size.height, size.width, self.pipeline.vae_scale_factor
        )
        return pixels_of_videos(self.vae.decode(vae_latents(self.vae, latents_BCFHW), return_dict=False)[0])


def _call_arguments(model: QwenImageModel, guidance: float) -> dict[str, Any]:
    return {"true_cfg_scale": guidance, "max_sequence_length": TEXT_LENGTH}


# mu from .5 at 256 tokens to .9 at 8192; the last noise level before 0 is always .02.
SCHEDULER = Part(
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


def _write_tiny(directory: Path, seed: int) -> None:
    template = pipeline_without(QwenImagePipeline).prompt_template_encode
    tokenizer = tiny_qwen_tokenizer(template)
    with seeded_weights(seed):
        pipeline = QwenImagePipeline(
            transformer=QwenImageTransformer2DModel(
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=16,
                axes_dims_rope=(4, 6, 6),
            ),
            scheduler=SCHEDULER.build(),
            vae=AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1),
            text_encoder=tiny_qwen_text_encoder(tokenizer, width=16),
            tokenizer=tokenizer,
        )
    pipeline.save_pretrained(directory)


QWEN_IMAGE = Family(
    kind="image",
    pipeline_class=QwenImagePipeline,
    model_class=QwenImageModel,
    sizes={
        "20b": FullSize(
            billions=20.43,
            transformer=Part(QwenImageTransformer2DModel, {}),  # the class's defaults are the published model
            text_shapes={
                "encoder_hidden_states": (TEXT_LENGTH, 3584),
                "encoder_hidden_states_mask": (TEXT_LENGTH,),
            },
        ),
    },
    vae=Part(AutoencoderKLQwenImage, {}),
    scheduler=SCHEDULER,
    write_tiny=_write_tiny,
    tiny_size=SampleSize(height=32, width=32),
    call_arguments=_call_arguments,
    uses_negative_prompts=True,
)
