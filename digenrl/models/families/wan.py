"""Wan text-to-video: latents (C, F, h, w), UMT5 text padded with zeros, classifier-free guidance.

Wan2.1 has 16 latent channels and a token of 16 x 16 pixels, Wan2.2 5B has 48 and 32 x 32. Wan2.2 A14B is as
Wan2.1, with a transformer for high and one for low noise levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.models.contract import ComfyuiLayers, Conditioning, SampleSize, Schedule
from digenrl.models.experts import EXPERTS
from digenrl.models.families.parts.comfyui_layers import WAN_LAYERS
from digenrl.models.families.parts.helpers import (
    guided_velocity,
    latent_frames_height_width,
    pixels_of_videos,
    scaled_video_latents,
)
from digenrl.models.family import Component, Family, FullSize
from digenrl.models.parallel.token_exchange import TokenShares
from digenrl.models.pipeline_model import PipelineModel, TextLength, paired_negatives, schedule_of

TEXT_LENGTH = TextLength("tokenizer", default=512, most=512)  # the model was trained with 512
ABSENT = [None, None]  # how model_index.json lists a component that a pipeline lacks


class WanModel(PipelineModel):
    """L = (C, F, h, w). The text has a fixed length, with zeros after the end of the prompt, and no mask."""

    family = "wan"
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    comfyui_layers: ClassVar[ComfyuiLayers | None] = WAN_LAYERS
    default_guidance = 5.0
    block_state_arguments = ("hidden_states",)
    text_encoders = ("text_encoder",)
    text_length: ClassVar[TextLength | None] = TEXT_LENGTH
    self_attention = ("attn1",)
    may_have_experts = True

    @classmethod
    def check_index(cls, index: Mapping[str, Any]) -> None:
        lacking = [name for name in EXPERTS["both"] if index.get(name, ABSENT) == ABSENT]
        if index.get("boundary_ratio") is not None and lacking:
            raise ConfigError(
                f"model.source: a Wan2.2 A14B pipeline without {lacking[0]}; use one with both transformers"
            )

    def own_arguments(self, arguments: Mapping[str, Any], shares: TokenShares) -> dict[str, Any]:
        """The rotary tables."""
        return {"rotary_emb": tuple(shares.own(table, 1, "image") for table in arguments["rotary_emb"])}

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        device = self.text_device()
        positive, negative = self.pipeline.encode_prompt(
            list(prompts),
            negative_prompt=paired_negatives(prompts, negative_prompts),
            max_sequence_length=self.text_tokens,
            device=device,
        )
        return Conditioning({"encoder_hidden_states": positive}, {"encoder_hidden_states": negative})

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """UniPC's sigmas, of which the first is .999999, and its integer timesteps.

        Only its schedule is used. The steps themselves are Euler or stochastic: a step of a multistep solver has
        no density to score.
        """
        scheduler = self.fresh_scheduler()
        scheduler.set_timesteps(steps)
        return schedule_of(scheduler)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        frames_per_latent = self.pipeline.vae_scale_factor_temporal
        pixels_per_latent = self.pipeline.vae_scale_factor_spatial
        return self.vae.config.z_dim, *latent_frames_height_width(size, frames_per_latent, pixels_per_latent)

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """One timestep per sample: Wan2.2 5B could take one per token, but without an image they are all equal."""
        return guided_velocity(self, latents_BL, timesteps_B, conditioning, guidance)

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        scaled_BCFHW = scaled_video_latents(self.vae, latents_BL)
        return pixels_of_videos(self.vae.decode(scaled_BCFHW, return_dict=False)[0])


def _scheduler(shift: float) -> Component:
    return Component(
        UniPCMultistepScheduler,
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift},
    )


# A shift of 3 is for 480p. The published recommendation for 720p is 5: flow_shift in scheduler_config.json.
SCHEDULER = _scheduler(shift=3.0)
SCHEDULER_2_2 = _scheduler(shift=5.0)
SETTINGS_2_2 = {"expand_timesteps": True}
SETTINGS_A14B = {"boundary_ratio": 0.875}  # of the number of trained timesteps
VAE_2_2 = Component(
    AutoencoderKLWan,
    {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,  # loaded pipelines have measured values; random weights have none
        "latents_std": [1.0] * 48,
    },
)


def full_size(hub_id: str, billions: float, layers: int, heads: int, ffn_dim: int, **others: Any) -> FullSize:
    """A published size; `shape` has further arguments of the transformer."""
    shape = {"num_layers": layers, "num_attention_heads": heads, "ffn_dim": ffn_dim, **others.pop("shape", {})}
    return FullSize(
        billions,
        Component(WanTransformer3DModel, shape),
        text_shapes={"encoder_hidden_states": (TEXT_LENGTH.default, 4096)},
        hub_id=f"Wan-AI/{hub_id}-Diffusers",
        **others,
    )


WAN = Family(
    kind="video",
    pipeline_class=WanPipeline,
    model_class=WanModel,
    sizes={
        "2.1-1.3b": full_size("Wan2.1-T2V-1.3B", 1.42, layers=30, heads=12, ffn_dim=8960),
        "2.1-14b": full_size("Wan2.1-T2V-14B", 14.29, layers=40, heads=40, ffn_dim=13824),
        "2.2-5b": full_size(
            "Wan2.2-TI2V-5B",
            *(5.00, 30, 24, 14336),
            shape={"in_channels": 48, "out_channels": 48},
            vae=VAE_2_2,
            scheduler=SCHEDULER_2_2,
            pipeline_settings=SETTINGS_2_2,
        ),
        "2.2-a14b": full_size("Wan2.2-T2V-A14B", *(28.58, 40, 40, 13824), pipeline_settings=SETTINGS_A14B),
    },
    vae=Component(AutoencoderKLWan, {}),
    scheduler=SCHEDULER,
    uses_negative_prompts=True,
)
