"""FLUX.2 klein: Qwen3 text from three layers, latents of 128 channels, classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor

from digenrl.models.contract import Conditioning, SampleSize, Schedule, Text
from digenrl.models.families.parts.comfyui_layers import FLUX_2_LAYERS
from digenrl.models.families.parts.helpers import (
    JOINT_ATTENTION,
    image_latents,
    latent_height_width,
    pixels_of_images,
    require_one_frame,
    text_like,
)
from digenrl.models.family import Component, Distilled, Family, FullSize
from digenrl.models.pipeline_model import TextLength, TwoBranchModel, schedule_of

TEXT_LENGTH = TextLength("tokenizer", default=512, most=512)  # with the chat template; the pipeline's default


class Flux2KleinModel(TwoBranchModel):
    """L = (128, h, w), where one latent is a token of 16 x 16 pixels. The text has a fixed length and no mask.

    A distilled model ignores the guidance, as in the diffusers pipeline.
    """

    family = "flux2_klein"
    lora_targets = (*JOINT_ATTENTION, "to_qkv_mlp_proj")
    comfyui_layers = FLUX_2_LAYERS
    default_guidance = 4.0
    text_encoders = ("text_encoder",)
    text_length = TEXT_LENGTH

    def negative_arguments(self, negative_prompts: Sequence[str]) -> dict[str, Any]:
        """The pipeline takes encoded negative prompts only."""
        return {"negative_prompt_embeds": self.encode_side(list(negative_prompts))["encoder_hidden_states"]}

    def encode_side(self, prompts: list[str]) -> Text:
        text_BTD, _ = self.pipeline.encode_prompt(
            prompts, device=self.text_device(), max_sequence_length=self.text_tokens
        )
        return {"encoder_hidden_states": text_BTD}

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """Evenly spaced sigmas, shifted by the number of image tokens and of steps."""
        scheduler = self.fresh_scheduler()
        _, h, w = self.noise_shape(size)
        mu = compute_empirical_mu(image_seq_len=h * w, num_steps=steps)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        return schedule_of(scheduler)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        require_one_frame(size, self.family)
        h, w = latent_height_width(size, 2 * self.pipeline.vae_scale_factor, patch=1)
        return 4 * self.vae.config.latent_channels, h, w

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        guidance = 1.0 if self.pipeline.config.is_distilled else guidance
        return super().velocity(latents_BL, timesteps_B, conditioning, guidance, size)

    def branch(
        self, latents_BL: Tensor, timesteps_B: Tensor, text: Text, images: Mapping[str, Tensor], size: SampleSize
    ) -> Tensor:
        return self._forward(latents_BL, timesteps_B, text, guidance=None)

    def _forward(self, latents_BL: Tensor, timesteps_B: Tensor, text: Text, guidance: float | None) -> Tensor:
        """The output of the transformer, which may take the guidance."""
        latents_BL = latents_BL.to(self.dtype)
        device, (h, w) = latents_BL.device, latents_BL.shape[2:]
        arguments = text_like(text, latents_BL)
        text_BTD = arguments["encoder_hidden_states"]
        assert text_BTD is not None, "the transformer's text is never optional"
        output_BSC: Tensor = self.transformer(
            hidden_states=latents_BL.flatten(2).transpose(1, 2),
            timestep=timesteps_B.to(device=device, dtype=latents_BL.dtype) / 1000,
            guidance=None if guidance is None else latents_BL.new_full([len(latents_BL)], guidance),
            txt_ids=positions(device, 1, 1, text_BTD.shape[1]),
            img_ids=positions(device, h, w, 1),
            return_dict=False,
            **arguments,
        )[0]
        return output_BSC.transpose(1, 2).reshape(len(output_BSC), -1, h, w)

    def pipeline_latents(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        return self._unpacked(latents_BL)

    def _unpacked(self, latents_BL: Tensor) -> Tensor:
        """In the VAE's scale, with every 2 x 2 patch of 32 channels in place."""
        latents_BCHW = latents_BL.to(self.vae.dtype)
        mean, std = self._mean_and_std(latents_BCHW)
        unpacked: Tensor = self.pipeline._unpatchify_latents(latents_BCHW * std + mean)
        return unpacked

    def _mean_and_std(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Of every channel of a patch, in the VAE's scale."""
        norm = self.vae.bn
        mean = norm.running_mean.view(1, -1, 1, 1).to(like)
        std = torch.sqrt(norm.running_var.view(1, -1, 1, 1) + self.vae.config.batch_norm_eps).to(like)
        return mean, std

    @torch.no_grad()
    def encode_pixels(self, pixels_BFCHW: Tensor) -> Tensor:
        latents_BCHW = self.pipeline._patchify_latents(image_latents(self.vae, pixels_BFCHW)).float()
        mean, std = self._mean_and_std(latents_BCHW)
        unscaled: Tensor = (latents_BCHW - mean) / std
        return unscaled

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        return pixels_of_images(self.vae.decode(self._unpacked(latents_BL), return_dict=False)[0])


@cache
def positions(device: torch.device, rows: int, columns: int, tokens: int) -> Tensor:
    """The position of every token: (image, row, column, place in the text). Computed once, on the host."""
    axes = [torch.arange(count) for count in (1, rows, columns, tokens)]
    return torch.cartesian_prod(*axes).to(device)


SCHEDULER = Component(FlowMatchEulerDiscreteScheduler, {"shift": 3.0, "use_dynamic_shifting": True})


def _full(hub_id: str, billions: float, layers: int, single_layers: int, heads: int, text_width: int) -> FullSize:
    shape = {
        "num_layers": layers,
        "num_single_layers": single_layers,
        "num_attention_heads": heads,
        "joint_attention_dim": text_width,
        "guidance_embeds": False,
    }
    return FullSize(
        billions,
        Component(Flux2Transformer2DModel, shape),
        text_shapes={"encoder_hidden_states": (TEXT_LENGTH.default, text_width)},
        hub_id=f"black-forest-labs/{hub_id}",
    )


FLUX2_KLEIN = Family(
    kind="image",
    pipeline_class=Flux2KleinPipeline,
    model_class=Flux2KleinModel,
    sizes={
        "4b": _full("FLUX.2-klein-base-4B", 3.88, layers=5, single_layers=20, heads=24, text_width=7680),
        "9b": _full("FLUX.2-klein-base-9B", 9.08, layers=8, single_layers=24, heads=32, text_width=12288),
    },
    vae=Component(AutoencoderKLFlux2, {}),  # the class's defaults: the published VAE
    scheduler=SCHEDULER,
    uses_negative_prompts=True,
    distilled=(
        Distilled("FLUX.2-klein-4B", steps=4, guidance=1.0),
        Distilled("FLUX.2-klein-9B", steps=4, guidance=1.0),
    ),
)
