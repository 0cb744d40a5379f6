"""What Stable Diffusion 1.5, 2.1 and XL share: a UNet that predicts noise, seen as one that predicts velocities.

The UNet's latents are a x0 + b noise with a^2 + b^2 = 1. Divided by a + b they are (1 - sigma) x0 + sigma noise,
with sigma = b / (a + b): the latents of this module. A DDIM step without noise is then exactly an Euler step, and
every kind of noise and every algorithm for velocities applies.
Shape legend as in `digenrl.models.contract`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers import DDIMScheduler
from diffusers.schedulers.scheduling_ddim import DDIMSchedulerOutput
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.models.contract import Conditioning, SampleSize, Schedule, Text
from digenrl.models.families.parts.comfyui_layers import DIFFUSERS_NAMES
from digenrl.models.families.parts.helpers import (
    guided_together,
    image_latents,
    latent_height_width,
    pixels_of_images,
    require_one_frame,
    text_like,
)
from digenrl.models.pipeline_model import PipelineModel, at_least_fp32

PREDICTIONS = ("epsilon", "v_prediction")


class UNetModel(PipelineModel):
    """L = (C, h, w)."""

    denoiser = "unet"
    takes_shift = False
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    comfyui_layers = DIFFUSERS_NAMES
    block_state_arguments = ("hidden_states", "input_tensor")

    def __init__(self, pipeline: Any) -> None:
        self._predicts = pipeline.scheduler.config.get("prediction_type", "epsilon")
        super().__init__(pipeline)
        self._levels: dict[torch.device, Tensor] = {}

    def check_denoising(self) -> None:
        scheduler = self.pipeline.scheduler
        if self._predicts not in PREDICTIONS:
            raise ConfigError(
                f"{self.family}: the model predicts '{self._predicts}'; known: {', '.join(PREDICTIONS)}"
            )
        if not hasattr(scheduler, "alphas_cumprod"):  # `beta_schedule` may be left from another scheduler
            raise ConfigError(
                f"{self.family}: the pipeline's {type(scheduler).__name__} does not compute noise levels "
                "from betas; models with other levels, such as those of EDM, are not supported"
            )
        if self.pipeline.unet.config.get("time_cond_proj_dim"):
            raise ConfigError(
                f"{self.family}: the unet takes guidance as an input (`time_cond_proj_dim`), as those of LCM do, "
                "which is not supported"
            )

    def pipeline_scheduler(self) -> Any:
        """DDIM whose last step ends at the data."""
        return DdimSteps.from_config(self.pipeline.scheduler.config, set_alpha_to_one=True, clip_sample=False)

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """The noise levels of DDIM's timesteps, and 0."""
        scheduler = self.pipeline_scheduler()
        scheduler.set_timesteps(steps)
        # With `steps_offset`, as many steps as there are levels would end one behind the last.
        behind = int(scheduler.timesteps.max()) + 1 - len(scheduler.alphas_cumprod)
        timesteps_N = scheduler.timesteps - max(0, behind)
        signal_N = scheduler.alphas_cumprod[timesteps_N].double()
        a_N, b_N = signal_N.sqrt(), (1 - signal_N).sqrt()
        if self._predicts == "epsilon" and a_N[0] == 0:
            raise ConfigError(
                f"{self.family}: the scheduler starts at pure noise (`rescale_betas_zero_snr`), where a model "
                "that predicts noise says nothing about the image; set `timestep_spacing: leading` in its config"
            )
        sigmas = torch.cat([b_N / (a_N + b_N), torch.zeros(1)])
        return Schedule(
            sigmas=sigmas.float(),
            timesteps=timesteps_N.float(),
            noise_scale=float(1 / (a_N[0] + b_N[0])),
        )

    def shifted_schedule(self, steps: int, shift: float) -> Schedule:
        raise ConfigError(f"sample.shift: {self.family} has fixed noise levels; leave it out")

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        require_one_frame(size, self.family)
        halvings = len(self.pipeline.unet.config.block_out_channels) - 1
        h, w = latent_height_width(size, self.pipeline.vae_scale_factor, patch=2**halvings)
        return self.vae.config.latent_channels, h, w

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """From the predicted noise, for which both branches of the guidance run in one batch."""
        latents_BL, timesteps_B = at_least_fp32(latents_BL), timesteps_B.to(latents_BL.device)
        a_B, b_B = self._signal_and_noise(timesteps_B, latents_BL)
        scaled_BL = latents_BL * (a_B + b_B)
        forward = partial(self._forward, size=size)
        output_BL = at_least_fp32(
            guided_together(forward, scaled_BL.to(self.dtype), timesteps_B, conditioning, guidance)
        )
        if self._predicts == "v_prediction":  # v = a noise - b x0; a may be 0
            noise_BL, data_BL = a_B * output_BL + b_B * scaled_BL, a_B * scaled_BL - b_B * output_BL
        else:
            noise_BL, data_BL = output_BL, (scaled_BL - b_B * output_BL) / a_B
        return noise_BL - data_BL

    def _signal_and_noise(self, timesteps_B: Tensor, latents_BL: Tensor) -> tuple[Tensor, Tensor]:
        """a and b of every row, from a table that is copied to the device once."""
        device = latents_BL.device
        if device not in self._levels:
            signal_T = self.pipeline_scheduler().alphas_cumprod.double()
            self._levels[device] = torch.stack([signal_T.sqrt(), (1 - signal_T).sqrt()], dim=1).to(device)
        rows_B2 = self._levels[device][timesteps_B.long()].to(latents_BL.dtype)
        a_B, b_B = rows_B2.view(-1, 2, *[1] * (latents_BL.ndim - 1)).unbind(1)
        return a_B, b_B

    def _forward(self, scaled_BL: Tensor, timesteps_B: Tensor, text: Text, size: SampleSize) -> Tensor:
        arguments = self.unet_arguments(text_like(text, scaled_BL), size)
        output: Tensor = self.transformer(scaled_BL, timesteps_B, return_dict=False, **arguments)[0]
        return output

    def unet_arguments(self, text: dict[str, Tensor | None], size: SampleSize) -> dict[str, Any]:
        """The UNet's arguments besides latents and timesteps."""
        return dict(text)

    @torch.no_grad()
    def encode_pixels(self, pixels_BFCHW: Tensor) -> Tensor:
        scale_C11, mean_C11 = self._latent_scale_and_mean()
        return (image_latents(self.vae, pixels_BFCHW).float() - mean_C11) / scale_C11

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        scale_C11, mean_C11 = self._latent_scale_and_mean()
        latents_BCHW = latents_BL.to(self.vae.device) * scale_C11 + mean_C11
        return pixels_of_images(self.vae.decode(latents_BCHW.to(self.vae.dtype), return_dict=False)[0])

    def _latent_scale_and_mean(self) -> tuple[Tensor, Tensor]:
        """The VAE's latents are these times the UNet's, plus the mean; some VAEs have them by channel."""
        config = self.vae.config
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if mean is None or std is None:
            mean, std = [0.0], [1.0]
        mean_C11, std_C11 = torch.tensor([mean, std], device=self.vae.device).view(2, -1, 1, 1)
        return std_C11 / config.scaling_factor, mean_C11


class DdimSteps(DDIMScheduler):  # type: ignore[misc]
    """DDIM that steps from each of its levels to the next one.

    That of diffusers takes steps of the same length, even if its levels are not equally far apart, as with
    `timestep_spacing: linspace`.
    """

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *arguments: Any, **named: Any) -> Any:
        later = [int(each) for each in self.timesteps if each < timestep]
        after = max(later, default=-1)
        if after == max(-1, int(timestep) - self.config.num_train_timesteps // self.num_inference_steps):
            return super().step(model_output, timestep, sample, *arguments, **named)
        signal, signal_after = self.alphas_cumprod[timestep], self.final_alpha_cumprod
        if after >= 0:
            signal_after = self.alphas_cumprod[after]
        a, b = signal.sqrt(), (1 - signal).sqrt()
        if self.config.prediction_type == "v_prediction":
            data, noise = a * sample - b * model_output, a * model_output + b * sample
        else:
            data, noise = (sample - b * model_output) / a, model_output
        assert not named.get("eta"), "a step without noise"
        latents = signal_after.sqrt() * data + (1 - signal_after).sqrt() * noise
        return DDIMSchedulerOutput(latents, data) if named.get("return_dict", True) else (latents, data)
