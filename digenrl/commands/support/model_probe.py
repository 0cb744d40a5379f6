"""Tokenizes, encodes, denoises and decodes a probe with a model, and with its diffusers pipeline for comparison.

Shape legend: B = 1 sample, L = latents in the layout of the family's transformer, F = frames, C = 3 colors, H, W.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from torch import Tensor

from digenrl.models.experts import parts_of
from digenrl.models.loading.pipelines import without_progress_bars
from digenrl.models.pipeline_model import PipelineModel
from digenrl.prompts.source_images import probe_image
from digenrl.worker.blueprint import Blueprint
from digenrl.worker.checks.sources import sources_of
from digenrl.worker.encoding import encode_prompt


@dataclass(frozen=True, slots=True)
class TokenizedProbe:
    """The token ids of a text, and the tokens themselves, by the name of the tokenizer."""

    token_ids: dict[str, list[int]]
    tokens: dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A sample, and the largest difference of its latents from those of the diffusers pipeline."""

    max_difference: float
    pixels_FCHW: Tensor


def tokenize(model: PipelineModel, text: str) -> TokenizedProbe:
    """The text as every tokenizer of the pipeline reads it, without the family's prompt template."""
    tokenizers = {
        name: part
        for name, part in model.pipeline.components.items()
        if part is not None and (name.startswith("tokenizer") or name in model.processors)
    }
    ids = {name: [int(each) for each in tokenizer(text).input_ids] for name, tokenizer in tokenizers.items()}
    tokens = {name: tokenizers[name].convert_ids_to_tokens(each) for name, each in ids.items()}
    return TokenizedProbe(ids, tokens)


@torch.no_grad()
def compare_with_diffusers(
    blueprint: Blueprint, model: PipelineModel, prompt: str, steps: int, seed: int
) -> Comparison:
    """A sample of the prompt with Euler steps and the family's schedule, and the same from diffusers."""
    diffusers_logging.set_verbosity_error()  # no warnings about the length of the prompt
    size = blueprint.size
    generator = torch.Generator().manual_seed(seed)
    noise_B = torch.randn(1, *model.noise_shape(size), generator=generator)
    start_BL = model.initial_latents(noise_B, size)
    row = encode_prompt(blueprint, model, prompt, _probe_images(blueprint, model), held_out=False)
    conditioning = model.compact(row).to(model.device)
    schedule = model.schedule(steps, size)
    latents_BL = start_BL * schedule.noise_scale
    for index, time in enumerate(schedule.timesteps):
        velocity_BL = model.rollout_velocity(latents_BL, time.expand(1), conditioning, blueprint.guidance, size)
        latents_BL = latents_BL + (schedule.sigmas[index + 1] - schedule.sigmas[index]) * velocity_BL
    expected_BL = _denoised_by_diffusers(blueprint, model, prompt, steps, start_BL)
    difference = (model.pipeline_latents(latents_BL, size).float() - expected_BL.float()).abs().max()
    return Comparison(float(difference), model.decode(latents_BL, size)[0].cpu())


def _denoised_by_diffusers(
    blueprint: Blueprint, model: PipelineModel, prompt: str, steps: int, start_BL: Tensor
) -> Tensor:
    family, size, images = blueprint.family, blueprint.size, _probe_images(blueprint, model)
    negative = blueprint.recipe.model.negative_prompt or ""
    with without_progress_bars():
        pipeline = plain_pipeline(model)
        if images and family.kind == "image":  # pipelines that edit encode sources in the model's dtype
            pipeline.vae = deepcopy(model.vae).to(model.dtype)
        model.prepare_pipeline(pipeline, blueprint.guidance, size)
        latents_BL: Tensor = pipeline(
            prompt=[prompt],
            output_type="latent",
            return_dict=False,
            **model.step_arguments(steps),
            **({"num_frames": size.frames} if family.kind == "video" else {}),
            **(model.negative_arguments([negative]) if family.uses_negative_prompts else {}),
            **(model.source_arguments(images, size) if images else {}),
            **model.sample_arguments(start_BL, size),
            **model.pipeline_arguments(blueprint.guidance),
        )[0]
    return latents_BL


def _probe_images(blueprint: Blueprint, model: PipelineModel) -> list[Image.Image]:
    """As many source images as the model needs at least, in a size that the diffusers pipeline keeps."""
    size = model.pipeline_source_size(blueprint.size)
    return [probe_image(size.height, size.width)] * sources_of(blueprint).least


def plain_pipeline(model: PipelineModel) -> Any:
    """The diffusers pipeline of a model with an unmodified transformer; the weights are shared."""
    pipeline = model.whole_pipeline()
    for part, ours in parts_of(model.transformer).items():
        with init_empty_weights(include_buffers=False):
            transformer = type(ours).from_config(ours.config)
        transformer.load_state_dict(ours.state_dict(), assign=True)
        setattr(pipeline, part or model.denoiser, transformer.to(model.device).eval())
    pipeline.scheduler = model.pipeline_scheduler()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
