"""Trains the model of the editing demo from scratch: first the VAE, then the transformer, which is stopped early.

    python tools/demo/pretrain_edits.py OUT_DIR        # about five minutes on one core

OUT_DIR becomes the directory of a FluxKontextPipeline. It roughly knows which shape to paint in which color, and
leaves room for RL.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel
from edit_pictures import SIDE, WORDS, as_pixels, draw_edit
from pretrain import Draws, minimize, standardize_latents, train_autoencoder, write_in_half_precision
from rich.progress import Progress, TextColumn
from torch import Tensor
from untrained_pipeline import SHIFT, small_t5, small_vae

from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.families.flux_kontext import FluxKontextModel
from digenrl.models.families.parts.helpers import source_name
from digenrl.testing.tiny_models import seeded_weights
from digenrl.testing.tiny_text_encoders import tiny_clip, tiny_clip_tokenizer, tiny_t5_tokenizer

SIZE = SampleSize(SIDE, SIDE)
TEXT_LENGTH, TEXT_WIDTH = 12, 64
HEADS, HEAD_WIDTH = 4, 20
VAE_STEPS, STEPS = 1500, 120
VAE_BATCH, BATCH = 16, 64
LEARNING_RATE = 2e-3
DRAWN = 4096  # cases


def untrained_pipeline(seed: int) -> FluxKontextPipeline:
    """All components with random weights. The text encoders are not trained."""
    with seeded_weights(seed):
        clip_tokenizer = tiny_clip_tokenizer(WORDS, TEXT_LENGTH)
        t5_tokenizer = tiny_t5_tokenizer(WORDS, TEXT_LENGTH)
        return FluxKontextPipeline(
            transformer=FluxTransformer2DModel(
                in_channels=64,
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=HEAD_WIDTH,
                num_attention_heads=HEADS,
                joint_attention_dim=TEXT_WIDTH,
                pooled_projection_dim=TEXT_WIDTH // 2,
                axes_dims_rope=(4, 8, 8),
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
            vae=small_vae(),
            text_encoder=tiny_clip(clip_tokenizer, width=TEXT_WIDTH // 2),
            tokenizer=clip_tokenizer,
            text_encoder_2=small_t5(t5_tokenizer),
            tokenizer_2=t5_tokenizer,
        )


def pretrain(directory: Path, seed: int, vae_steps: int, steps: int) -> None:
    """Writes the pipeline."""
    pipeline, random = untrained_pipeline(seed), Random(seed + 1)
    draws = Draws(random, torch.Generator().manual_seed(seed))
    edits = [draw_edit(random) for _ in range(DRAWN)]
    sources, targets = (as_pixels([draw() for draw in each]) for each in _pictures(edits))
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[loss]}")) as progress:
        train_autoencoder(
            pipeline.vae, lambda: sources[random.sample(range(DRAWN), VAE_BATCH)], vae_steps, draws, progress
        )
        standardize_latents(pipeline.vae, sources[:512])
        model = FluxKontextModel(pipeline)
        prompts = [edit.prompt for edit in edits]
        train_transformer(
            model, prompts, _latents(model, sources), _latents(model, targets), steps, draws, progress
        )
    write_in_half_precision(pipeline, directory)


def _pictures(edits: list[Any]) -> tuple[list[Any], list[Any]]:
    return [edit.source for edit in edits], [edit.target for edit in edits]


@torch.no_grad()
def _latents(model: FluxKontextModel, pixels_NCHW: Tensor) -> Tensor:
    latents: Tensor = model.pipeline._encode_vae_image(pixels_NCHW, None)
    return latents


def train_transformer(
    model: FluxKontextModel,
    prompts: list[str],
    sources_NCHW: Tensor,
    targets_NCHW: Tensor,
    steps: int,
    draws: Draws,
    progress: Progress,
) -> None:
    """Flow matching from noise to the edited picture, given the source."""
    different = list(dict.fromkeys(prompts))
    texts = model.encode(different)
    rows = torch.tensor([different.index(prompt) for prompt in prompts])

    def loss() -> Tensor:
        chosen = torch.tensor(draws.random.sample(range(len(prompts)), BATCH))
        clean_BL = model.initial_latents(targets_NCHW[chosen], SIZE)
        noise_BL = torch.randn(clean_BL.shape, generator=draws.generator)
        sigma_B = torch.randn(BATCH, generator=draws.generator).sigmoid()
        sigma_B11 = sigma_B[:, None, None]
        noised_BL = (1 - sigma_B11) * clean_BL + sigma_B11 * noise_BL
        conditioning = Conditioning(
            texts.rows(rows[chosen]).positive, images={source_name(0): sources_NCHW[chosen]}
        )
        velocity_BL = model.velocity(noised_BL, 1000 * sigma_B, conditioning, 1.0, SIZE)
        distance: Tensor = (velocity_BL - (noise_BL - clean_BL)).square().mean()
        return distance

    minimize(model.transformer, loss, steps, LEARNING_RATE, "transformer", progress)


def main() -> None:
    """Trains and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=VAE_STEPS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the transformer")
    given = parser.parse_args()
    pretrain(given.directory, given.seed, given.vae_steps, given.steps)


if __name__ == "__main__":
    main()
