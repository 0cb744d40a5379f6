"""FLUX.1: pooled CLIP and T5, latents packed into 2 x 2 patches, guidance embedded in the transformer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.models.contract import Conditioning, SampleSize, Schedule
from digenrl.models.family import Family, FullSize, Part
from digenrl.models.pipeline_model import (
    PipelineModel,
    at_least_fp32,
    latent_height_width,
    pixels_of_images,
    require_one_frame,
    schedule_of,
    shift_from_tokens,
)
from digenrl.models.tiny import (
    seeded_weights,
    tiny_clip,
    tiny_clip_tokenizer,
    tiny_image_vae,
    tiny_t5,
    tiny_t5_tokenizer,
)

T5_LENGTH = 512  # tokens; the pipeline's own default


class FluxModel(PipelineModel):
    """L = (tokens, 4C): one token per 2 x 2 patch, row by row. The text has a fixed length: there is no mask."""

    family = "flux"
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
    default_guidance = 3.5
    text_encoders = ("text_encoder", "text_encoder_2")

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self._places: dict[tuple[int, int, torch.device, torch.dtype], Tensor] = {}

    @property
    def t5_length(self) -> int:
        """To how many tokens the text is padded or cut."""
        return min(T5_LENGTH, int(self.pipeline.tokenizer_2.model_max_length))

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        """As the pipeline encodes them. Guidance is embedded, so there is no unconditional branch to encode."""
        if negative_prompts is not None:
            raise ConfigError("flux has embedded guidance and takes no negative prompts; leave them out")
        embeddings, pooled, _ = self.pipeline.encode_prompt(
            prompt=list(prompts), device=self.text_device(), max_sequence_length=self.t5_length
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

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        """(C, h, w)."""
        require_one_frame(size, self.family)
        h, w = latent_height_width(size, self.pipeline.vae_scale_factor)
        return self.vae.config.latent_channels, h, w

    def initial_latents(self, noise_B: Tensor, size: SampleSize) -> Tensor:
        """The noise, packed: (B, C, h, w) becomes (B, hw/4, 4C)."""
        packed: Tensor = self.pipeline._pack_latents(noise_B.to(self.device), *noise_B.shape)
        return packed

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """v of every row, in one forward: any guidance, 1 or less too, is an input of the transformer.

        A transformer without guidance embeddings (FLUX.1-schnell) is not given any.
        """
        dtype, device = self.dtype, latents_BL.device
        positive = conditioning.positive
        text = {name: None if value is None else value.to(device, dtype) for name, value in positive.items()}
        tokens_of_text = next(value.shape[1] for value in text.values() if value is not None and value.ndim == 3)
        _, h, w = self.noise_shape(size)
        guidance_B = torch.full([len(latents_BL)], guidance, device=device, dtype=torch.float32)
        output: Tensor = self.transformer(
            hidden_states=latents_BL.to(dtype),
            timestep=timesteps_B.to(device=device, dtype=dtype) / 1000,
            guidance=guidance_B if self.pipeline.transformer.config.guidance_embeds else None,
            txt_ids=torch.zeros(tokens_of_text, 3, device=device, dtype=dtype),
            img_ids=self._image_ids(h // 2, w // 2, device, dtype),
            return_dict=False,
            **text,
        )[0]
        return at_least_fp32(output)

    def _image_ids(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Where each token stands; made on the host, so once."""
        key = (rows, columns, device, dtype)
        if key not in self._places:
            self._places[key] = self.pipeline._prepare_latent_image_ids(1, rows, columns, device, dtype)
        return self._places[key]

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        """Pixels in [0, 1], fp32: (B, 1, 3, height, width)."""
        latents_BCHW = self.pipeline._unpack_latents(
            latents_BL.to(self.vae.dtype), size.height, size.width, self.pipeline.vae_scale_factor
        )
        latents_BCHW = latents_BCHW / self.vae.config.scaling_factor + self.vae.config.shift_factor
        return pixels_of_images(self.vae.decode(latents_BCHW, return_dict=False)[0])


SCHEDULER = Part(FlowMatchEulerDiscreteScheduler, {"shift": 3.0, "use_dynamic_shifting": True})
VAE = Part(
    AutoencoderKL,
    {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 16,
        "sample_size": 1024,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
)


def _call_arguments(model: FluxModel, guidance: float) -> dict[str, Any]:
    return {"guidance_scale": guidance, "max_sequence_length": model.t5_length}


def _write_tiny(directory: Path, seed: int) -> None:
    clip_tokenizer = tiny_clip_tokenizer()
    t5_tokenizer = tiny_t5_tokenizer()
    with seeded_weights(seed):
        pipeline = FluxPipeline(
            transformer=FluxTransformer2DModel(
                in_channels=64,
                num_layers=1,
                num_single_layers=2,
                attention_head_dim=8,
                num_attention_heads=2,
                joint_attention_dim=32,
                pooled_projection_dim=16,
                guidance_embeds=True,
                axes_dims_rope=(2, 2, 4),
            ),
            scheduler=SCHEDULER.build(),
            vae=tiny_image_vae(scaling_factor=0.3611, shift_factor=0.1159),
            text_encoder=tiny_clip(clip_tokenizer, width=16),
            tokenizer=clip_tokenizer,
            text_encoder_2=tiny_t5(t5_tokenizer, width=32),
            tokenizer_2=t5_tokenizer,
        )
    pipeline.save_pretrained(directory)


FLUX = Family(
    kind="image",
    pipeline_class=FluxPipeline,
    model_class=FluxModel,
    sizes={
        "1-dev": FullSize(
            billions=11.90,
            transformer=Part(FluxTransformer2DModel, {"guidance_embeds": True}),
            text_shapes={"encoder_hidden_states": (T5_LENGTH, 4096), "pooled_projections": (768,)},
        ),
    },
    vae=VAE,
    scheduler=SCHEDULER,
    write_tiny=_write_tiny,
    tiny_size=SampleSize(height=32, width=32),
    call_arguments=_call_arguments,
    uses_negative_prompts=False,
)
