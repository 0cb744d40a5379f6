"""LTX-2 from text: the video of a model of video and audio, which attend to each other, with Gemma 3 text.

A sample is both tracks, sampled and trained together; only the video is decoded. Neither the audio VAE nor the
vocoder is loaded. Shape legend as in `digenrl.models.contract`; S = video tokens, A = audio tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.models.contract import SampleSize, Schedule, Text
from digenrl.models.families.parts.comfyui_layers import LTX_2_LAYERS
from digenrl.models.families.parts.helpers import (
    latent_frames_height_width,
    pixels_of_videos,
    stretched_schedule,
    text_like,
)
from digenrl.models.family import Component, Family, FullSize
from digenrl.models.pipeline_model import TwoBranchModel, at_least_fp32

TEXT_TOKENS = 1024  # the pipeline's default; learned tokens take the place of padding
FRAME_RATE = 24.0  # frames per second, the pipeline's default
AUDIO_CHANNELS, MEL_BINS = 8, 64  # of the published audio VAE
MEL_BINS_PER_LATENT = 4


class NoAudioDecoder:
    """In place of the audio VAE and of the vocoder: audio latents are left as they are."""

    latents_mean, latents_std, dtype = torch.zeros(()), torch.ones(()), torch.float32
    config = SimpleNamespace(mel_bins=MEL_BINS, latent_channels=AUDIO_CHANNELS)

    def decode(self, latents: Tensor, **_settings: Any) -> tuple[Tensor]:
        return (latents,)

    def __call__(self, latents: Tensor) -> Tensor:
        return latents


class LTX2Model(TwoBranchModel):
    """L = (S + A, C): the video's tokens, then the audio's, which have as many channels."""

    family = "ltx2"
    lora_targets = tuple(
        f"{layer}.{name}" for layer in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0")
    )
    comfyui_layers = LTX_2_LAYERS
    default_guidance = 4.0
    block_state_arguments = ("hidden_states", "audio_hidden_states")
    text_encoders = ("text_encoder", "connectors")
    unused_components = ("audio_vae", "vocoder", "processor", "prompt_enhancer", "duration_head")

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self._positions: dict[tuple[SampleSize, torch.device], tuple[Tensor, Tensor]] = {}

    @property
    def text_tokens(self) -> int:
        tokenizer = self.pipeline.tokenizer
        return TEXT_TOKENS if tokenizer is None else min(TEXT_TOKENS, int(tokenizer.model_max_length))

    def own_components(self) -> dict[str, Any]:
        return {"audio_vae": NoAudioDecoder(), "vocoder": NoAudioDecoder()}

    def pipeline_arguments(self, guidance: float) -> dict[str, Any]:
        """Without the pipeline's further kinds of guidance, which skip layers or the other track."""
        video = {"guidance_scale": guidance, "stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
        audio = {f"audio_{name}": value for name, value in video.items()}
        return {**video, **audio, "frame_rate": FRAME_RATE, "max_sequence_length": self.text_tokens}

    def sample_arguments(self, latents_BL: Tensor, size: SampleSize) -> dict[str, Any]:
        audio_BAC = latents_BL[:, self._video_tokens(size) :]
        bins = MEL_BINS // MEL_BINS_PER_LATENT
        return {
            "latents": self._scaled_video(latents_BL, size),
            "audio_latents": audio_BAC.reshape(*audio_BAC.shape[:2], AUDIO_CHANNELS, bins).transpose(1, 2),
            "height": size.height,
            "width": size.width,
        }

    def pipeline_latents(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        """Those of the video, as the VAE takes them."""
        return self._scaled_video(latents_BL, size)

    def encode_side(self, prompts: list[str]) -> Text:
        text_BTD, mask_BT, *_ = self.pipeline.encode_prompt(
            prompts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.text_tokens,
            device=self.text_device(),
        )
        video_BTD, audio_BTD, _ = self.pipeline.connectors(
            text_BTD, mask_BT, padding_side=self.pipeline.tokenizer.padding_side
        )
        return {"encoder_hidden_states": video_BTD, "audio_encoder_hidden_states": audio_BTD}

    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        return stretched_schedule(self, steps, self._video_tokens(size), default_max_shift=2.05)

    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        return self._video_tokens(size) + self.audio_tokens(size), self.vae.config.latent_channels

    def latent_frames(self, size: SampleSize) -> int:
        return self._grid(size)[0]

    def audio_tokens(self, size: SampleSize) -> int:
        pipeline = self.pipeline
        per_second = pipeline.audio_sampling_rate / pipeline.audio_hop_length
        latents_per_second: float = per_second / float(pipeline.audio_vae_temporal_compression_ratio)
        return round(size.frames / FRAME_RATE * latents_per_second)

    def branch(
        self, latents_BL: Tensor, timesteps_B: Tensor, text: Text, images: Mapping[str, Tensor], size: SampleSize
    ) -> Tensor:
        """Of both tracks, which get the same guidance, in fp32: the pipeline combines its branches so."""
        rows, latents_BL, tokens = len(latents_BL), latents_BL.to(self.dtype), self._video_tokens(size)
        times_B = timesteps_B.to(latents_BL.device)
        video_positions, audio_positions = self._positions_of(size, latents_BL.device)
        video_BSC, audio_BAC = self.transformer(
            hidden_states=latents_BL[:, :tokens],
            audio_hidden_states=latents_BL[:, tokens:],
            timestep=times_B,
            sigma=times_B,
            video_coords=video_positions.expand(rows, -1, -1, -1),
            audio_coords=audio_positions.expand(rows, -1, -1, -1),
            use_cross_timestep=True,
            return_dict=False,
            **text_like(text, latents_BL),
        )
        return at_least_fp32(torch.cat([video_BSC, audio_BAC], dim=1))

    def _positions_of(self, size: SampleSize, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where and when the tokens of both tracks are; kept, since they are made on the host."""
        if (size, device) not in self._positions:
            transformer: Any = self.transformer
            video = transformer.rope.prepare_video_coords(1, *self._grid(size), device, fps=FRAME_RATE)
            audio = transformer.audio_rope.prepare_audio_coords(1, self.audio_tokens(size), device)
            self._positions[size, device] = (video, audio)
        return self._positions[size, device]

    @torch.no_grad()
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        latents_BCFHW = self._scaled_video(latents_BL, size).to(self.vae.dtype)
        return pixels_of_videos(self.vae.decode(latents_BCFHW, None, return_dict=False)[0])

    def _scaled_video(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        video_BSC = latents_BL[:, : self._video_tokens(size)]
        video_BCFHW = self.pipeline._unpack_latents(video_BSC, *self._grid(size))
        mean, std, scale = self.vae.latents_mean, self.vae.latents_std, self.vae.config.scaling_factor
        scaled_BCFHW: Tensor = self.pipeline._denormalize_latents(video_BCFHW, mean, std, scale)
        return scaled_BCFHW

    def _video_tokens(self, size: SampleSize) -> int:
        frames, height, width = self._grid(size)
        return frames * height * width

    def _grid(self, size: SampleSize) -> tuple[int, int, int]:
        pipeline = self.pipeline
        pixels = pipeline.vae_spatial_compression_ratio
        if min(size.height, size.width) == pixels:  # padding by reflection needs a second latent
            raise ConfigError(f"height and width must be at least {2 * pixels}, got {size.height} x {size.width}")
        return latent_frames_height_width(size, pipeline.vae_temporal_compression_ratio, pixels, patch=1)


SCHEDULER = Component(
    FlowMatchEulerDiscreteScheduler,
    {
        "use_dynamic_shifting": True,
        "base_image_seq_len": 1024,
        "max_image_seq_len": 4096,
        "base_shift": 0.95,
        "max_shift": 2.05,
        "shift_terminal": 0.1,
    },
)
VAE = Component(
    AutoencoderKLLTX2Video,
    {"decoder_causal": False, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
)

LTX2 = Family(
    kind="video",
    pipeline_class=LTX2Pipeline,
    model_class=LTX2Model,
    sizes={
        "19b": FullSize(
            billions=18.88,
            transformer=Component(LTX2VideoTransformer3DModel, {"rope_type": "split"}),
            text_shapes={
                "encoder_hidden_states": (TEXT_TOKENS, 3840),
                "audio_encoder_hidden_states": (TEXT_TOKENS, 3840),
            },
            hub_id="Lightricks/LTX-2",
        ),
    },
    vae=VAE,
    scheduler=SCHEDULER,
    uses_negative_prompts=True,
)
