"""Stable Diffusion 3 and 3.5: two CLIP encoders and T5, unpacked latents, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor
from torch.nn import functional

from digenrl.models.contract import Conditioning, SampleSize, Schedule, Text
from digenrl.models.families.parts.comfyui_layers import DIFFUSERS_NAMES, SD3_FUSED_LAYERS
from digenrl.models.families.parts.helpers import JOINT_ATTENTION, guided_velocity, shift_from_tokens
from digenrl.models.families.parts.image_vae import ImageVaeModel, image_vae
from digenrl.models.family import Component, Distilled, Family, FullSize
from digenrl.models.pipeline_model import TextLength, paired_negatives, schedule_of

TEXT_LENGTH = TextLength("tokenizer_3", default=256, most=512)  # of T5's part; the pipeline's default and limit
CLIP_TEXT = "clip_hidden_states"  # instead of encoder_hidden_states, if there is no T5


class SD3Model(ImageVaeModel):
    """L = (C, h, w). The text is CLIP's 77 tokens followed by T5's, at a fixed length without a mask.

    Pipelines are often saved without T5, which is most of their size. Its part of the text is then zeros.
    """

    family = "sd3"
    lora_targets = JOINT_ATTENTION
    comfyui_layers = DIFFUSERS_NAMES
    fused_layers = SD3_FUSED_LAYERS
    default_guidance = 4.5
    text_encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    optional_components = ("text_encoder_3", "tokenizer_3")
    text_length = TEXT_LENGTH
    self_attention = ("attn", "attn2")  # of text and image, and in some blocks of the image alone

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        if self.pipeline.text_encoder_3 is None:
            return Conditioning(
                self._encode_with_clip(list(prompts)),
                self._encode_with_clip(paired_negatives(prompts, negative_prompts)),
            )
        positive, negative, pooled, negative_pooled = self.pipeline.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            negative_prompt=paired_negatives(prompts, negative_prompts),
            device=self.text_device(),
            max_sequence_length=self.text_tokens,
        )
        return Conditioning(
            positive={"encoder_hidden_states": positive, "pooled_projections": pooled},
            negative={"encoder_hidden_states": negative, "pooled_projections": negative_pooled},
        )

    def _encode_with_clip(self, prompts: list[str]) -> dict[str, Tensor | None]:
        """CLIP's part of the text as it is: the transformer's width, to which it is padded, may not be known."""
        parts = [
            self.pipeline._get_clip_prompt_embeds(prompts, device=self.text_device(), clip_model_index=index)
            for index in range(2)
        ]
        text_BTD, pooled_BD = (torch.cat(values, dim=-1) for values in zip(*parts, strict=True))
        return {CLIP_TEXT: text_BTD, "pooled_projections": pooled_BD}

    def _with_t5_part(self, text: Text) -> Text:
        """The transformer's text arguments: if there is no T5, CLIP's text is padded with zeros."""
        clip_BTD = text.get(CLIP_TEXT)
        if clip_BTD is None:
            return text
        width = self.pipeline.transformer.config.joint_attention_dim - clip_BTD.shape[2]
        padded_BTD = functional.pad(clip_BTD, (0, width, 0, self.text_tokens))
        return {"encoder_hidden_states": padded_BTD, "pooled_projections": text["pooled_projections"]}

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """Shifted by a fixed amount, or by the number of tokens if the scheduler's configuration says so."""
        scheduler = self.fresh_scheduler()
        _, h, w = self.noise_shape(size)
        shift = {}
        if scheduler.config.get("use_dynamic_shifting", None):
            shift["mu"] = shift_from_tokens(scheduler.config, tokens=(h // 2) * (w // 2), default_max_shift=1.16)
        scheduler.set_timesteps(steps, **shift)
        return schedule_of(scheduler)

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        negative = None if conditioning.negative is None else self._with_t5_part(conditioning.negative)
        text = Conditioning(self._with_t5_part(conditioning.positive), negative)
        return guided_velocity(self, latents_BL, timesteps_B, text, guidance)


SCHEDULER = Component(FlowMatchEulerDiscreteScheduler, {"shift": 3.0})
TEXT_SHAPES = {"encoder_hidden_states": (77 + TEXT_LENGTH.default, 4096), "pooled_projections": (2048,)}


def _full(hub_id: str, billions: float, layers: int, **arguments: Any) -> FullSize:
    """A published size: it has as many heads, of width 64, as layers."""
    shape = {
        "num_layers": layers,
        "num_attention_heads": layers,
        "attention_head_dim": 64,
        "caption_projection_dim": 64 * layers,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
    }
    transformer = Component(SD3Transformer2DModel, shape | arguments)
    return FullSize(billions, transformer, TEXT_SHAPES, hub_id=f"stabilityai/{hub_id}")


SD3 = Family(
    kind="image",
    pipeline_class=StableDiffusion3Pipeline,
    model_class=SD3Model,
    sizes={
        "3.5-medium": _full(
            "stable-diffusion-3.5-medium",
            *(2.24, 24),
            pos_embed_max_size=384,
            dual_attention_layers=tuple(range(13)),
            qk_norm="rms_norm",
        ),
        "3.5-large": _full("stable-diffusion-3.5-large", 8.06, 38, pos_embed_max_size=192, qk_norm="rms_norm"),
        "3-medium": _full("stable-diffusion-3-medium-diffusers", 2.03, 24, pos_embed_max_size=192),
    },
    vae=image_vae(scaling_factor=1.5305, shift_factor=0.0609),
    scheduler=SCHEDULER,
    uses_negative_prompts=True,
    distilled=(Distilled("stable-diffusion-3.5-large-turbo", steps=4, guidance=1.0),),
)
