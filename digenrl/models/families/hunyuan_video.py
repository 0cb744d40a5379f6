"""HunyuanVideo: latents (16, F, h, w), Llama with a mask and pooled CLIP, guidance embedded in the transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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
from digenrl.models.contract import Conditioning, SampleSize, Schedule
from digenrl.models.families.video_helpers import latent_frames_height_width, pixels_of_videos
from digenrl.models.family import Family, FullSize, Part
from digenrl.models.pipeline_model import PipelineModel, at_least_fp32, schedule_of
from digenrl.models.tiny import seeded_weights
from digenrl.models.tiny_video import tiny_llama, tiny_llama_tokenizer, tiny_long_clip, tiny_long_clip_tokenizer

TEXT_LENGTH = 256  # tokens of Llama's part, behind the template; the pipeline's own default


class OptionallyMasked(HunyuanVideoAttnProcessor2_0):  # type: ignore[misc]
    """Attention of all blocks, by the fast kernel where no text is padded: it takes no mask, not even of ones."""

    masked = True

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """As diffusers does it, but for the mask."""
        mask = attention_mask if self.masked else None
        return super().__call__(attn, hidden_states, encoder_hidden_states, mask, image_rotary_emb)


class HunyuanVideoModel(PipelineModel):
    """L = (C, F, h, w). Text is kept at one length, with a mask; a forward takes what its rows have of it."""

    family = "hunyuan_video"
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
    default_guidance = 6.0
    text_encoders = ("text_encoder", "text_encoder_2")
    text_mask = "encoder_attention_mask"

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self._attention = OptionallyMasked()
        if self.transformer is not None:
            for block in repeated_blocks(self.transformer):
                block.attn.set_processor(self._attention)  # type: ignore[union-attr,operator]

    def dimensions_of_text(self, arguments: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """The text and, where it counts, the mask of the whole sequence, which ends with it."""
        mask = [(arguments["attention_mask"], 3)] if self._attention.masked else []
        return [(arguments["encoder_hidden_states"], 1), *mask]

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        """As the pipeline encodes them. Guidance is embedded, so there is no unconditional branch to encode."""
        device = self.text_device()
        if negative_prompts is not None:
            raise ValueError("hunyuan_video has embedded guidance and takes no negative prompts; leave them out")
        text_BTD, pooled_BD, mask_BT = self.pipeline.encode_prompt(
            list(prompts), device=device, max_sequence_length=TEXT_LENGTH
        )
        return Conditioning(
            {"encoder_hidden_states": text_BTD, "encoder_attention_mask": mask_BT, "pooled_projections": pooled_BD}
        )

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """Even levels from 1, shifted by the scheduler's fixed amount.

        The levels are given, not left to the scheduler: its own end point is already shifted and would be shifted
        once more.
        """
        scheduler = self.fresh_scheduler()
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
        return schedule_of(scheduler)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        """(C, F, h, w)."""
        frames_per_latent = self.pipeline.vae_scale_factor_temporal
        pixels_per_latent = self.pipeline.vae_scale_factor_spatial
        grid = latent_frames_height_width(size, frames_per_latent, pixels_per_latent)
        return self.vae.config.latent_channels, *grid

    def initial_latents(self, noise_B: Tensor, size: SampleSize) -> Tensor:
        """The noise itself."""
        return noise_B.to(self.device)

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """v of every row, in one forward: any guidance, 1 or less too, is an input of the transformer."""
        dtype, device = self.dtype, latents_BL.device
        given = self.compact(conditioning).positive
        text = {name: None if value is None else value.to(dtype) for name, value in given.items()}
        self._attention.masked = text[self.text_mask] is not None
        if not self._attention.masked:  # the transformer asks for one all the same
            words_BT = text["encoder_hidden_states"]
            assert words_BT is not None, "a transformer's text is never optional"
            text[self.text_mask] = words_BT.new_ones(words_BT.shape[:2])
        guidance_B = torch.full([len(latents_BL)], guidance, device=device, dtype=dtype) * 1000
        velocity_BL: Tensor = self.transformer(
            hidden_states=latents_BL.to(dtype),
            timestep=timesteps_B.to(device),
            guidance=guidance_B,
            return_dict=False,
            **text,
        )[0]
        return at_least_fp32(velocity_BL)

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        """Pixels in [0, 1], fp32: (B, frames, 3, height, width)."""
        latents_BL = latents_BL.to(self.vae.dtype) / self.vae.config.scaling_factor
        return pixels_of_videos(self.vae.decode(latents_BL, return_dict=False)[0])


SCHEDULER = Part(FlowMatchEulerDiscreteScheduler, {"shift": 7.0})


def _call_arguments(model: HunyuanVideoModel, guidance: float) -> dict[str, Any]:
    return {"guidance_scale": guidance, "max_sequence_length": TEXT_LENGTH}


def _write_tiny(directory: Path, seed: int) -> None:
    tokenizer, clip_tokenizer = tiny_llama_tokenizer(), tiny_long_clip_tokenizer()
    with seeded_weights(seed):
        pipeline = HunyuanVideoPipeline(
            transformer=HunyuanVideoTransformer3DModel(
                num_layers=1,
                num_single_layers=2,
                num_refiner_layers=1,
                attention_head_dim=16,
                num_attention_heads=2,
                text_embed_dim=16,
                pooled_projection_dim=16,
                rope_axes_dim=(4, 6, 6),
            ),
            scheduler=SCHEDULER.build(),
            vae=AutoencoderKLHunyuanVideo(block_out_channels=(4, 8, 8, 8), layers_per_block=1, norm_num_groups=4),
            text_encoder=tiny_llama(tokenizer, width=16),
            tokenizer=tokenizer,
            text_encoder_2=tiny_long_clip(clip_tokenizer, width=16),
            tokenizer_2=clip_tokenizer,
        )
    pipeline.save_pretrained(directory)


HUNYUAN_VIDEO = Family(
    kind="video",
    pipeline_class=HunyuanVideoPipeline,
    model_class=HunyuanVideoModel,
    sizes={
        "13b": FullSize(
            billions=12.82,
            transformer=Part(HunyuanVideoTransformer3DModel, {}),  # the class's defaults are the published model
            text_shapes={
                "encoder_hidden_states": (TEXT_LENGTH, 4096),
                "encoder_attention_mask": (TEXT_LENGTH,),
                "pooled_projections": (768,),
            },
        ),
    },
    vae=Part(AutoencoderKLHunyuanVideo, {}),
    scheduler=SCHEDULER,
    write_tiny=_write_tiny,
    tiny_size=SampleSize(height=32, width=32, frames=5),
    call_arguments=_call_arguments,
    uses_negative_prompts=False,
)
