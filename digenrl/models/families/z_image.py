"""Z-Image: one stream of image and text tokens, Qwen3 text, classifier-free guidance.

Shape legend as in `digenrl.models.contract`; T = text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from digenrl.models.blocks import repeated_blocks
from digenrl.models.contract import SampleSize, Schedule, Text
from digenrl.models.families.parts.comfyui_layers import DIFFUSERS_NAMES, Z_IMAGE_FUSED_LAYERS
from digenrl.models.families.parts.helpers import shift_from_tokens
from digenrl.models.families.parts.image_vae import ImageVaeModel, image_vae
from digenrl.models.family import Component, Distilled, Family, FullSize
from digenrl.models.passes.attention import AttentionProcessor
from digenrl.models.passes.rotation import rotated
from digenrl.models.pipeline_model import TextLength, TwoBranchModel, at_least_fp32, schedule_of

TEXT_LENGTH = TextLength("tokenizer", default=512, most=512)  # with the chat template; the pipeline's default


class RealTables:
    """The transformer's rotary tables in real numbers, which a compiler can fuse."""

    def __init__(self, tables: Any) -> None:
        self.tables = tables

    def __call__(self, ids: Tensor) -> Tensor:
        """(tokens, channel pairs, 2)."""
        return torch.view_as_real(self.tables(ids))


class SingleStreamAttention(AttentionProcessor):
    """An attention processor of all tokens, with rotary tables in real numbers."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        """The tokens after the output layer."""
        assert freqs_cis is not None, "as this transformer calls it"
        query, key, value = (
            layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        joint_BSHD = dispatch_attention_fn(
            rotated(attn.norm_q(query), freqs_cis),
            rotated(attn.norm_k(key), freqs_cis),
            value,
            attn_mask=None if attention_mask is None else attention_mask[:, None, None, :],
            backend=self._attention_backend,
        )
        output: Tensor = attn.to_out[0](joint_BSHD.flatten(2, 3).to(hidden_states.dtype))
        return output


class ZImageModel(TwoBranchModel, ImageVaeModel):
    """L = (C, h, w). Text is stored at a fixed length with a mask; forwards get each row at its own length.

    `guidance` is w in unconditional + w (conditional - unconditional), as in all families. diffusers' pipeline
    counts from 0: its `guidance_scale` is one less.
    """

    family = "z_image"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    comfyui_layers = DIFFUSERS_NAMES
    fused_layers = Z_IMAGE_FUSED_LAYERS
    default_guidance = 5.0
    block_state_arguments = ("x",)
    blocks_before_chain = ("noise_refiner", "context_refiner")
    text_encoders = ("text_encoder",)
    text_mask = "cap_mask"
    text_length = TEXT_LENGTH
    text_multiple = 32

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        if self.transformer is not None:
            transformer = pipeline.transformer
            transformer.rope_embedder = RealTables(transformer.rope_embedder)
            for block in repeated_blocks(transformer):
                block.attention.set_processor(SingleStreamAttention())  # type: ignore[union-attr,operator]

    def pipeline_arguments(self, guidance: float) -> dict[str, Any]:
        arguments = super().pipeline_arguments(guidance)
        return arguments | {self.guidance_argument: _added_guidance(guidance)}

    def text_length_dims(self, arguments: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """All tokens, their rotary table and, if texts differ in length, the mask."""
        mask_BS = arguments["attn_mask"]
        return [(arguments["x"], 1), (arguments["freqs_cis"], 1), *([] if mask_BS is None else [(mask_BS, 1)])]

    def encode_side(self, prompts: list[str]) -> dict[str, Tensor | None]:
        texts, _ = self.pipeline.encode_prompt(
            prompts,
            device=self.text_device(),
            do_classifier_free_guidance=False,
            max_sequence_length=self.text_tokens,
        )
        longest = texts[0].new_zeros(self.text_tokens, texts[0].shape[1])
        text_BTD = pad_sequence([*texts, longest], batch_first=True)[:-1]
        length_B1 = torch.tensor([[len(text)] for text in texts], device=text_BTD.device)
        return {
            "cap_feats": text_BTD,
            "cap_mask": (torch.arange(self.text_tokens, device=text_BTD.device) < length_B1).long(),
        }

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """Evenly spaced sigmas, shifted by a fixed amount or by the number of tokens, as the scheduler is set."""
        scheduler = self.fresh_scheduler()
        _, h, w = self.noise_shape(size)
        shift = shift_from_tokens(scheduler.config, tokens=(h // 2) * (w // 2), default_max_shift=1.15)
        scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1 / steps, steps).tolist(), mu=shift)
        return schedule_of(scheduler)

    def branch(
        self, latents_BL: Tensor, timesteps_B: Tensor, text: Text, images: Mapping[str, Tensor], size: SampleSize
    ) -> Tensor:
        """The transformer's time runs from 0, noise, to 1, and its output is minus the velocity."""
        latents_BL = latents_BL.to(self.dtype)
        outputs: list[Tensor] = self.transformer(
            list(latents_BL.unsqueeze(2)),
            (1000 - timesteps_B.to(latents_BL.device)) / 1000,
            _rows_of_text(text, latents_BL),
            return_dict=False,
        )[0]
        return -at_least_fp32(torch.stack(outputs).squeeze(2))

    def guided(self, conditional_BL: Tensor, unconditional_BL: Tensor, guidance: float) -> Tensor:
        """With the rounding of the diffusers pipeline."""
        return conditional_BL + _added_guidance(guidance) * (conditional_BL - unconditional_BL)


def _added_guidance(guidance: float) -> float:
    """The weight of (conditional - unconditional) beside the conditional velocity."""
    return max(guidance - 1.0, 0.0)


def _rows_of_text(text: Text, latents_BL: Tensor) -> list[Tensor]:
    """Every row's text without padding."""
    text_BTD, mask_BT = text["cap_feats"], text["cap_mask"]
    assert text_BTD is not None, "the transformer's text is never optional"
    rows = list(text_BTD.to(latents_BL))
    if mask_BT is None:
        return rows
    return [row[:length] for row, length in zip(rows, mask_BT.sum(dim=1).int().tolist(), strict=True)]


SCHEDULER = Component(FlowMatchEulerDiscreteScheduler, {"shift": 6.0})

Z_IMAGE = Family(
    kind="image",
    pipeline_class=ZImagePipeline,
    model_class=ZImageModel,
    sizes={
        "6b": FullSize(
            billions=6.15,
            transformer=Component(ZImageTransformer2DModel, {}),  # the class's defaults: the published model
            text_shapes={"cap_feats": (TEXT_LENGTH.default, 2560), "cap_mask": (TEXT_LENGTH.default,)},
            hub_id="Tongyi-MAI/Z-Image",
        ),
    },
    vae=image_vae(scaling_factor=0.3611, shift_factor=0.1159),
    scheduler=SCHEDULER,
    uses_negative_prompts=True,
    distilled=(Distilled("Z-Image-Turbo", steps=8, guidance=1.0),),
)
