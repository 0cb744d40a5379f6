"""HunyuanVideo 1.5: latents (32, F, h, w), Qwen2.5-VL text, ByT5 glyphs, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from torch import Tensor
from torch.nn.functional import pad

from digenrl.config.reading import ConfigError
from digenrl.models.blocks import repeated_blocks
from digenrl.models.contract import SampleSize, Text
from digenrl.models.families.parts.comfyui_layers import HUNYUAN_VIDEO_1_5_LAYERS
from digenrl.models.families.parts.helpers import text_like
from digenrl.models.families.parts.hunyuan import HunyuanModel
from digenrl.models.families.parts.hunyuan_attention import VideoThenText, refine_words, video_forward
from digenrl.models.family import Component, Distilled, Family, FullSize
from digenrl.models.pipeline_model import TextLength, TwoBranchModel

TEXT_LENGTH = TextLength("tokenizer", default=1000, most=1000)  # of Qwen2.5-VL, after the template
GLYPH_TOKENS = 256  # of ByT5, for texts in quotation marks
GLYPHS = "glyphs"  # in the text: True for a glyph, False for a word and for padding
FIRST_FRAME, IMAGE_TOKENS = "first_frame", "image_embeds"  # in the conditioning, if there is a source image


class HunyuanVideo15Model(TwoBranchModel, HunyuanModel):
    """L = (C, F, h, w), where one latent is a token of 16 x 16 pixels.

    The text of a row is its glyphs and then its words, padded at the end; `glyphs` tells them apart. The states of
    glyphs are padded to the width of words.
    """

    family = "hunyuan_video_1_5"
    comfyui_layers = HUNYUAN_VIDEO_1_5_LAYERS
    patch = 1
    text_length = TEXT_LENGTH
    unused_by_encoders = ()  # the pipeline's constructor reads the configuration of the VAE

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        if self.vae is not None:
            self.vae.enable_slicing()  # it decodes one sample at a time only
        if self.transformer is not None:
            if self.pipeline.transformer.config.get("use_meanflow"):
                raise ConfigError(
                    f"{self.family}: the transformer is distilled for MeanFlow (`use_meanflow`), whose velocity "
                    "depends on two timesteps; use a model that is not step-distilled"
                )
            self.transformer.forward = MethodType(video_forward, self.transformer)
            refiner = self.pipeline.transformer.context_embedder.token_refiner
            refiner.forward = MethodType(refine_words, refiner)
            for block in repeated_blocks(self.transformer):
                block.attn.set_processor(VideoThenText())  # type: ignore[union-attr,operator]

    def pipeline_arguments(self, guidance: float) -> dict[str, Any]:
        return {}

    def prepare_pipeline(self, pipeline: Any, guidance: float, size: SampleSize) -> None:
        pipeline.guider = pipeline.guider.new(guidance_scale=max(guidance, 1.0))
        pipeline.tokenizer_max_length = self.text_tokens
        pipeline.vae.enable_slicing()

    def text_length_dims(self, arguments: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        mask = arguments["attention_mask"]
        return [(arguments["encoder_hidden_states"], 1), *([] if mask is None else [(mask, 1)])]

    def compact_text(self, text: Text) -> Text:
        """As of all families, and without the places of glyphs if there are none."""
        cut = super().compact_text(text)
        glyphs_BT1 = cut.get(GLYPHS)
        if glyphs_BT1 is None or text[self.text_mask] is None or bool(glyphs_BT1.any()):  # None: it is compact
            return cut
        return {**cut, GLYPHS: None}

    def encode_side(self, prompts: list[str]) -> Text:
        device = self.text_device()
        self.pipeline.tokenizer_max_length = self.text_tokens
        words_BTD, word_mask_BT, glyphs_BTD, glyph_mask_BT = self.pipeline.encode_prompt(
            prompts, device=device, batch_size=len(prompts)
        )
        glyphs_BTD = pad(glyphs_BTD, (0, words_BTD.shape[2] - glyphs_BTD.shape[2]))
        mask_BT = torch.cat([glyph_mask_BT, word_mask_BT], dim=1)
        order_BT = (mask_BT == 0).int().argsort(dim=1, stable=True)  # padding last
        text_BTD = torch.cat([glyphs_BTD, words_BTD], dim=1)
        is_glyph_BT = torch.cat([glyph_mask_BT > 0, torch.zeros_like(word_mask_BT, dtype=torch.bool)], dim=1)
        return {
            "encoder_hidden_states": text_BTD.gather(1, order_BT[..., None].expand_as(text_BTD)),
            self.text_mask: mask_BT.gather(1, order_BT),
            GLYPHS: is_glyph_BT.gather(1, order_BT)[..., None],
        }

    def branch(
        self, latents_BL: Tensor, timesteps_B: Tensor, text: Text, images: Mapping[str, Tensor], size: SampleSize
    ) -> Tensor:
        latents_BL = latents_BL.to(self.dtype)
        velocity_BL: Tensor = self.transformer(
            hidden_states=torch.cat([latents_BL, given_frames(latents_BL, images.get(FIRST_FRAME))], dim=1),
            timestep=timesteps_B.to(latents_BL),
            **text_like({**text, IMAGE_TOKENS: images.get(IMAGE_TOKENS)}, latents_BL),
        )[0]
        return velocity_BL


def given_frames(latents_BL: Tensor, first_BC1HW: Tensor | None) -> Tensor:
    """The latents of a video with this first frame only, and a mask of its frames, as channels."""
    rows, channels, *grid = latents_BL.shape
    given_BL = latents_BL.new_zeros(rows, channels + 1, *grid)
    if first_BC1HW is not None:
        given_BL[:, :channels, :1] = first_BC1HW.to(latents_BL)
        given_BL[:, channels, 0] = 1
    return given_BL


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
    distilled=tuple(
        Distilled(f"HunyuanVideo-1.5-Diffusers-{kind}_distilled", steps=None, guidance=1.0)
        for kind in ("480p_t2v", "480p_i2v", "720p_t2v", "720p_i2v")
    ),
)
