"""HunyuanVideo: latents (16, F, h, w), Llama text with a mask, pooled CLIP, embedded guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import Tensor

from digenrl.models.blocks import repeated_blocks
from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.families.parts.comfyui_layers import HUNYUAN_VIDEO_LAYERS
from digenrl.models.families.parts.helpers import refuse_negatives, text_like
from digenrl.models.families.parts.hunyuan import HunyuanModel
from digenrl.models.family import Component, Family, FullSize
from digenrl.models.parallel.token_exchange import TokenShares
from digenrl.models.pipeline_model import TextLength, at_least_fp32

TEXT_LENGTH = TextLength("tokenizer", default=256, most=256)  # of Llama, after the template; as trained


class OptionallyMasked(HunyuanVideoAttnProcessor2_0):  # type: ignore[misc]
    """Attention that drops the mask if no text is padded: the fast kernel takes no mask, not even one of ones."""

    masked = True

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        mask = attention_mask if self.masked else None
        return super().__call__(attn, hidden_states, encoder_hidden_states, mask, image_rotary_emb)


class HunyuanVideoModel(HunyuanModel):
    """One forward, in which the guidance is an input; attention may be masked, if texts differ in length."""

    family = "hunyuan_video"
    comfyui_layers = HUNYUAN_VIDEO_LAYERS
    text_length = TEXT_LENGTH
    self_attention = ("attn",)

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self._attention = OptionallyMasked()
        if self.transformer is not None:
            for block in repeated_blocks(self.transformer):
                block.attn.set_processor(self._attention)  # type: ignore[union-attr,operator]

    def text_length_dims(self, arguments: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """The text and, if it is used, the mask of the whole sequence, which ends with the text."""
        mask = [(arguments["attention_mask"], 3)] if self._attention.masked else []
        return [(arguments["encoder_hidden_states"], 1), *mask]

    def own_arguments(self, arguments: Mapping[str, Any], shares: TokenShares) -> dict[str, Any]:
        """The rotary tables of the latents, and the mask of the whole sequence, which ends with the text."""
        name = (
            "freqs_cis" if "freqs_cis" in arguments else "image_rotary_emb"
        )  # in blocks of two streams, or of one
        return {
            name: tuple(shares.own(table, 0, "image") for table in arguments[name]),
            "attention_mask": shares.own(arguments["attention_mask"], 3, "image", "text"),
        }

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        device = self.text_device()
        refuse_negatives(negative_prompts, self.family)
        text_BTD, pooled_BD, mask_BT = self.pipeline.encode_prompt(
            list(prompts), device=device, max_sequence_length=self.text_tokens
        )
        return Conditioning(
            {"encoder_hidden_states": text_BTD, "encoder_attention_mask": mask_BT, "pooled_projections": pooled_BD}
        )

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """One forward: guidance, including 1 or less, is an input of the transformer."""
        latents_BL = latents_BL.to(self.dtype)
        text = text_like(conditioning.positive, latents_BL)
        self._attention.masked = text[self.text_mask] is not None
        if not self._attention.masked:  # the transformer requires a mask all the same
            text_BTD = text["encoder_hidden_states"]
            assert text_BTD is not None, "the transformer's text is never optional"
            text[self.text_mask] = text_BTD.new_ones(text_BTD.shape[:2])
        guidance_B = latents_BL.new_full([len(latents_BL)], guidance) * 1000
        velocity_BL: Tensor = self.transformer(
            hidden_states=latents_BL,
            timestep=timesteps_B.to(latents_BL),
            guidance=guidance_B,
            return_dict=False,
            **text,
        )[0]
        return at_least_fp32(velocity_BL)


SCHEDULER = Component(FlowMatchEulerDiscreteScheduler, {"shift": 7.0})

HUNYUAN_VIDEO = Family(
    kind="video",
    pipeline_class=HunyuanVideoPipeline,
    model_class=HunyuanVideoModel,
    sizes={
        "13b": FullSize(
            billions=12.82,
            transformer=Component(HunyuanVideoTransformer3DModel, {}),  # the class's defaults: the published model
            text_shapes={
                "encoder_hidden_states": (TEXT_LENGTH.default, 4096),
                "encoder_attention_mask": (TEXT_LENGTH.default,),
                "pooled_projections": (768,),
            },
            hub_id="hunyuanvideo-community/HunyuanVideo",
        ),
    },
    vae=Component(AutoencoderKLHunyuanVideo, {}),
    scheduler=SCHEDULER,
    uses_negative_prompts=False,
)
