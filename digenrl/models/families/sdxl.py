"""Stable Diffusion XL: two CLIP encoders, the size of the image as an input, a UNet, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor

from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.families.parts.image_vae import VAE_SHAPE
from digenrl.models.families.parts.unets import UNetModel
from digenrl.models.families.sd15 import SCHEDULER, TEXT_TOKENS
from digenrl.models.family import Component, Distilled, Family, FullSize
from digenrl.models.pipeline_model import paired_negatives


class SDXLModel(UNetModel):
    """The text has a fixed length and no mask. Without a negative prompt, the unconditional text is zeros."""

    family = "sdxl"
    default_guidance = 5.0
    text_encoders = ("text_encoder", "text_encoder_2")
    unused_components = ("image_encoder", "feature_extractor")

    def negative_arguments(self, negative_prompts: Sequence[str]) -> dict[str, Any]:
        return super().negative_arguments(negative_prompts) if any(negative_prompts) else {}

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        negatives = paired_negatives(prompts, negative_prompts)
        positive, negative, pooled, negative_pooled = self.pipeline.encode_prompt(
            list(prompts), device=self.text_device(), negative_prompt=negatives if any(negatives) else None
        )
        return Conditioning(
            {"encoder_hidden_states": positive, "text_embeds": pooled},
            {"encoder_hidden_states": negative, "text_embeds": negative_pooled},
        )

    def unet_arguments(self, text: dict[str, Tensor | None], size: SampleSize) -> dict[str, Any]:
        pooled_BD = text["text_embeds"]
        assert pooled_BD is not None, "the UNet's text is never optional"
        sizes_B6 = size_numbers(size, pooled_BD.device).to(pooled_BD.dtype).expand(len(pooled_BD), -1)
        return {
            "encoder_hidden_states": text["encoder_hidden_states"],
            "added_cond_kwargs": {"text_embeds": pooled_BD, "time_ids": sizes_B6},
        }


@cache
def size_numbers(size: SampleSize, device: torch.device) -> Tensor:
    """The size of an image that is not cropped, as the pipeline's default is. Copied from the host once."""
    numbers = [size.height, size.width, 0, 0, size.height, size.width]
    return torch.tensor([numbers], dtype=torch.float32).to(device)


SDXL = Family(
    kind="image",
    pipeline_class=StableDiffusionXLPipeline,
    model_class=SDXLModel,
    sizes={
        "1.0": FullSize(
            billions=2.57,
            transformer=Component(
                UNet2DConditionModel,
                {
                    "sample_size": 128,
                    "block_out_channels": (320, 640, 1280),
                    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                    "transformer_layers_per_block": (1, 2, 10),
                    "attention_head_dim": (5, 10, 20),
                    "cross_attention_dim": 2048,
                    "addition_embed_type": "text_time",
                    "addition_time_embed_dim": 256,
                    "projection_class_embeddings_input_dim": 2816,
                    "use_linear_projection": True,
                },
            ),
            text_shapes={"encoder_hidden_states": (TEXT_TOKENS, 2048), "text_embeds": (1280,)},
            hub_id="stabilityai/stable-diffusion-xl-base-1.0",
        ),
    },
    vae=Component(AutoencoderKL, {**VAE_SHAPE, "sample_size": 1024, "scaling_factor": 0.13025}),
    scheduler=SCHEDULER,
    uses_negative_prompts=True,
    distilled=(Distilled("sdxl-turbo", steps=4, guidance=1.0),),
)
