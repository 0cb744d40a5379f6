"""FLUX.1: pooled CLIP and T5, latents packed into 2 x 2 patches, guidance embedded in the transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor

from digenrl.models.blocks import repeated_blocks
from digenrl.models.contract import Conditioning, SampleSize, Schedule, Text
from digenrl.models.families.parts.comfyui_layers import DIFFUSERS_NAMES, FLUX_FUSED_LAYERS
from digenrl.models.families.parts.flux_attention import FluxAttention
from digenrl.models.families.parts.helpers import JOINT_ATTENTION, refuse_negatives, shift_from_tokens, text_like
from digenrl.models.families.parts.image_vae import ImageVaeModel, image_vae
from digenrl.models.family import Component, Distilled, Family, FullSize
from digenrl.models.parallel.token_exchange import TokenShares
from digenrl.models.pipeline_model import TextLength, at_least_fp32, schedule_of

TEXT_LENGTH = TextLength("tokenizer_2", default=512, most=512)  # of T5; the pipeline's default and limit


class FluxModel(ImageVaeModel):
    """L = (tokens, 4C): one token per 2 x 2 patch, row by row. The text has a fixed length and no mask."""

    family = "flux"
    lora_targets = JOINT_ATTENTION
    comfyui_layers = DIFFUSERS_NAMES
    fused_layers = FLUX_FUSED_LAYERS
    default_guidance = 3.5
    text_encoders = ("text_encoder", "text_encoder_2")
    text_length = TEXT_LENGTH
    self_attention = ("attn",)

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        if self.transformer is not None:
            for block in repeated_blocks(self.transformer):
                block.attn.set_processor(FluxAttention())  # type: ignore[union-attr,operator]

    def own_arguments(self, arguments: Mapping[str, Any], shares: TokenShares) -> dict[str, Any]:
        """The rotary tables, of text and image together."""
        tables = arguments["image_rotary_emb"]
        return {"image_rotary_emb": tuple(shares.own(table, 0, "text", "image") for table in tables)}

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        refuse_negatives(negative_prompts, self.family)
        embeddings, pooled, _ = self.pipeline.encode_prompt(
            prompt=list(prompts), device=self.text_device(), max_sequence_length=self.text_tokens
        )
        return Conditioning(positive={"encoder_hidden_states": embeddings, "pooled_projections": pooled})

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """Evenly spaced sigmas, shifted by the number of image tokens."""
        scheduler = self.fresh_scheduler()
        _, h, w = self.noise_shape(size)
        mu = shift_from_tokens(scheduler.config, tokens=(h // 2) * (w // 2), default_max_shift=1.15)
        if scheduler.config.get("use_flow_sigmas", False):
            scheduler.set_timesteps(steps, mu=mu)
        else:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        return schedule_of(scheduler)

    def initial_latents(self, noise_B: Tensor, size: SampleSize) -> Tensor:
        """The noise, packed: (B, C, h, w) becomes (B, hw/4, 4C)."""
        return self._packed(noise_B.to(self.device))

    def _packed(self, latents_BCHW: Tensor) -> Tensor:
        packed_BL: Tensor = self.pipeline._pack_latents(latents_BCHW, *latents_BCHW.shape)
        return packed_BL

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """One forward: guidance, including 1 or less, is an input of the transformer.

        A transformer without guidance embeddings (FLUX.1-schnell) gets None.
        """
        latents_BL = latents_BL.to(self.dtype)
        _, h, w = self.noise_shape(size)
        image_ids = image_positions(h // 2, w // 2, latents_BL.device, latents_BL.dtype)
        return self._forward(latents_BL, timesteps_B, conditioning.positive, guidance, image_ids)

    def _forward(
        self, tokens_BL: Tensor, timesteps_B: Tensor, text: Text, guidance: float, image_ids: Tensor
    ) -> Tensor:
        """The output for all image tokens, whose positions are `image_ids`."""
        dtype, device = tokens_BL.dtype, tokens_BL.device
        text = text_like(text, tokens_BL)
        text_tokens = next(value.shape[1] for value in text.values() if value is not None and value.ndim == 3)
        guidance_B = torch.full([len(tokens_BL)], guidance, device=device, dtype=torch.float32)
        output: Tensor = self.transformer(
            hidden_states=tokens_BL,
            timestep=timesteps_B.to(device=device, dtype=dtype) / 1000,
            guidance=guidance_B if self.pipeline.transformer.config.guidance_embeds else None,
            txt_ids=torch.zeros(text_tokens, 3, device=device, dtype=dtype),
            img_ids=image_ids,
            return_dict=False,
            **text,
        )[0]
        return at_least_fp32(output)

    @torch.no_grad()
    def encode_pixels(self, pixels_BFCHW: Tensor) -> Tensor:
        return self._packed(super().encode_pixels(pixels_BFCHW))

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        scale = self.pipeline.vae_scale_factor
        return super().decode(self.pipeline._unpack_latents(latents_BL, size.height, size.width, scale), size)


@cache
def image_positions(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The position of each token. Computed once, on the host."""
    positions: Tensor = FluxPipeline._prepare_latent_image_ids(1, rows, columns, device, dtype)
    return positions


SCHEDULER = Component(FlowMatchEulerDiscreteScheduler, {"shift": 3.0, "use_dynamic_shifting": True})

FLUX = Family(
    kind="image",
    pipeline_class=FluxPipeline,
    model_class=FluxModel,
    sizes={
        "1-dev": FullSize(
            billions=11.90,
            transformer=Component(FluxTransformer2DModel, {"guidance_embeds": True}),
            text_shapes={"encoder_hidden_states": (TEXT_LENGTH.default, 4096), "pooled_projections": (768,)},
            hub_id="black-forest-labs/FLUX.1-dev",
        ),
    },
    vae=image_vae(scaling_factor=0.3611, shift_factor=0.1159),
    scheduler=SCHEDULER,
    uses_negative_prompts=False,
    distilled=(Distilled("FLUX.1-schnell", steps=4, text_tokens=256),),
)
