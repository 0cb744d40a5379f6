"""A model with about two thousand parameters that implements the model contract, fast enough for unit tests.

One attention block over the tokens of a latent, given the time and a prompt hashed to an embedding. It predicts
a correction to the exact velocity of Gaussian data, so that its samples have the scale of real latents.
The transformer is a diffusers model: `add_adapter`, `disable_adapters` and `enable_gradient_checkpointing` work.

Shape legend as in `digenrl.models.contract`; S = tokens of a latent (h * w), T = text tokens, W = width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize, Schedule

LATENT_CHANNELS = 4
PIXELS_PER_LATENT = 2
TEXT_TOKENS = 3
TEXT_WIDTH = 8
DATA_STD = 0.6  # of the Gaussian data for which the uncorrected velocity is exact
SHIFT = 3.0
TOY_SIZE = SampleSize(height=8, width=8)  # latents of shape (4, 4, 4)


class ToyBlock(nn.Module):
    """Latent tokens attend to each other and to the text."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, latent_BSW: Tensor, text_BTW: Tensor) -> Tensor:
        both = torch.cat([latent_BSW, text_BTW], dim=1)
        scores = self.to_q(latent_BSW) @ self.to_k(both).transpose(1, 2) / math.sqrt(both.shape[-1])
        return latent_BSW + torch.tanh(self.to_out[0](scores.softmax(-1) @ self.to_v(both)))


class ToyTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Velocity of latents (B, 4, h, w) at times (B,) in [0, 1000] under text (B, T, 8)."""

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.proj_in = nn.Linear(LATENT_CHANNELS, width)
        self.time_in = nn.Linear(width, width)
        self.text_in = nn.Linear(TEXT_WIDTH, width)
        self.blocks = nn.ModuleList([ToyBlock(width)])
        self.proj_out = nn.Linear(width, LATENT_CHANNELS)

    def forward(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        rows, channels, height, width = hidden_states.shape
        sigma_B111 = (timestep.to(hidden_states.dtype) / 1000).view(rows, 1, 1, 1)
        latent_BSW = self.proj_in(hidden_states.flatten(2).transpose(1, 2)) + self._place(height * width)
        latent_BSW = latent_BSW + self.time_in(self._waves(sigma_B111.view(rows)))[:, None]
        text_BTW = self.text_in(encoder_hidden_states)
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            latent_BSW = self._gradient_checkpointing_func(self.blocks[0], latent_BSW, text_BTW)
        else:
            latent_BSW = self.blocks[0](latent_BSW, text_BTW)
        correction = self.proj_out(latent_BSW).transpose(1, 2).reshape(rows, channels, height, width)
        return _gaussian_velocity(hidden_states, sigma_B111) + correction

    def _waves(self, value_B: Tensor) -> Tensor:
        count = self.proj_out.in_features // 2
        angle = value_B[:, None] * torch.arange(1, count + 1, dtype=value_B.dtype, device=value_B.device)
        return torch.cat([angle.sin(), angle.cos()], dim=1)

    def _place(self, tokens: int) -> Tensor:
        place = torch.arange(tokens, dtype=self.proj_out.weight.dtype, device=self.proj_out.weight.device)
        return self._waves(place / tokens)


def _gaussian_velocity(latents: Tensor, sigma: Tensor) -> Tensor:
    """E[noise - x0 | x] for x0 ~ N(0, DATA_STD^2)."""
    data_variance = DATA_STD**2
    slope = (sigma - (1 - sigma) * data_variance) / ((1 - sigma) ** 2 * data_variance + sigma**2)
    return slope * latents


class ToyModel(DiffusionModel):
    """The whole model; equal seeds give equal weights in every dtype."""

    family = "toy"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    default_guidance = 3.0

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._has_text_encoder = True
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.transformer = nn.Module.to(ToyTransformer(), dtype).eval()

    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        if not self._has_text_encoder:
            raise RuntimeError("the text encoders were dropped; encode every prompt before drop_text_encoders()")
        negatives = [""] * len(prompts) if negative_prompts is None else negative_prompts
        return Conditioning(positive=self._embedded(prompts), negative=self._embedded(negatives))

    def _embedded(self, prompts: Sequence[str]) -> dict[str, Tensor | None]:
        def embed(prompt: str) -> Tensor:
            digest = hashlib.blake2b(prompt.encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            return torch.randn(TEXT_TOKENS, TEXT_WIDTH, generator=generator)

        rows_BTW = torch.stack([embed(prompt) for prompt in prompts])
        return {"encoder_hidden_states": rows_BTW.to(self.device, self._dtype)}

    def drop_text_encoders(self) -> None:
        self._has_text_encoder = False

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        return self.shifted_schedule(steps, SHIFT)

    def shifted_schedule(self, steps: int, shift: float) -> Schedule:
        even = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
        shifted = shift * even / (1 + (shift - 1) * even)
        sigmas = torch.cat([shifted, torch.zeros(1, dtype=torch.float64)]).float()
        return Schedule(sigmas=sigmas, timesteps=sigmas[:-1] * 1000)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        return (LATENT_CHANNELS, size.height // PIXELS_PER_LATENT, size.width // PIXELS_PER_LATENT)

    def initial_latents(self, noise_B: Tensor, size: SampleSize) -> Tensor:
        return noise_B.to(self.device, self._dtype)

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        latents = latents_BL.to(self._dtype)
        timesteps = timesteps_B.to(self.device)
        if guidance <= 1:
            return self._at_least_fp32(self.transformer(latents, timesteps, **conditioning.positive))
        assert conditioning.negative is not None, "guidance above 1 needs negative rows"
        text = {
            name: torch.cat([conditioning.negative[name], value]) for name, value in conditioning.positive.items()
        }
        both = self.transformer(torch.cat([latents] * 2), torch.cat([timesteps] * 2), **text)
        unconditional, conditional = both.chunk(2)
        return self._at_least_fp32(unconditional + guidance * (conditional - unconditional))

    def _at_least_fp32(self, velocity: Tensor) -> Tensor:
        return velocity.to(torch.promote_types(velocity.dtype, torch.float32))

    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        pixels_BCHW = torch.sigmoid(latents_BL[:, :3].float())
        for dim in (2, 3):
            pixels_BCHW = pixels_BCHW.repeat_interleave(PIXELS_PER_LATENT, dim=dim)
        return pixels_BCHW[:, None]
