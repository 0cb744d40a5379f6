"""Trains the demo model from scratch: first the VAE, then the transformer, which is stopped early on purpose.

    python tools/demo/pretrain.py OUT_DIR        # four minutes on one core

OUT_DIR becomes a diffusers pipeline directory. Some of the model's numbers must be legible, or all rewards would
be equal; others must not, to leave room for RL.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from number_images import draw_numbers, prompt_of
from readability import SIZE, exact_share, number_reader
from rich.progress import Progress, TextColumn
from torch import Tensor, nn
from untrained_pipeline import untrained_pipeline

from digenrl.config.recipes.prompts import PromptSettings
from digenrl.demo import held_out_prompts
from digenrl.models.families.sd3 import SD3Model
from digenrl.models.loading.pipelines import without_progress_bars
from digenrl.models.registry import find_family
from digenrl.prompts.sources import read_prompts

VAE_STEPS, STEPS = 2000, 420
VAE_BATCH, BATCH = 16, 64
VAE_LEARNING_RATE, LEARNING_RATE = 5e-3, 2e-3
KL_WEIGHT = 3e-4
WARM_UP = 50  # steps
STATISTICS_OVER = 512  # images


@dataclass(frozen=True, slots=True)
class Draws:
    """The random state after initialization: of numbers and images, and of noise."""

    random: Random
    generator: torch.Generator


def pretrain(directory: Path, seed: int, vae_steps: int, steps: int) -> float:
    """Writes the pipeline and returns the share of held-out numbers that are read exactly."""
    held_out = {prompt.text: None for prompt in read_prompts(PromptSettings(path=held_out_prompts()))}
    numbers = [number for number in range(1000, 10_000) if prompt_of(number) not in held_out]
    pipeline = untrained_pipeline(seed)
    draws = Draws(Random(seed), torch.Generator().manual_seed(seed))
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[loss]}")) as progress:
        train_vae(pipeline.vae, numbers, vae_steps, draws, progress)
        images = draw_numbers(draws.random.choices(numbers, k=STATISTICS_OVER), draws.random)
        standardize_latents(pipeline.vae, images)
        model = SD3Model(pipeline)
        train_transformer(model, numbers, steps, draws, progress)
    write_in_half_precision(pipeline, directory)
    return exact_share(find_family("sd3").load(directory), list(held_out), seed, number_reader())


def write_in_half_precision(pipeline: Any, directory: Path) -> None:
    """Saves transformer and VAE in fp16, at half the size; diffusers loads them in fp32 by default.

    The text encoders stay in fp32: transformers would load them in fp16.
    """
    pipeline.transformer.half()
    pipeline.vae.half()
    with without_progress_bars():
        pipeline.save_pretrained(directory)


def train_vae(vae: Any, numbers: list[int], steps: int, draws: Draws, progress: Progress) -> None:
    """Trains the autoencoder on pictures of numbers."""
    train_autoencoder(
        vae,
        lambda: draw_numbers(draws.random.choices(numbers, k=VAE_BATCH), draws.random),
        steps,
        draws,
        progress,
    )


def train_autoencoder(vae: Any, draw: Callable[[], Tensor], steps: int, draws: Draws, progress: Progress) -> None:
    """Trains on batches of pictures, with a KL term that keeps latents close to a normal distribution."""

    def loss() -> Tensor:
        images_BCHW = draw()
        posterior = vae.encode(images_BCHW).latent_dist
        decoded_BCHW = vae.decode(posterior.sample(draws.generator)).sample
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        total: Tensor = (decoded_BCHW - images_BCHW).square().mean() + KL_WEIGHT * kl
        return total

    minimize(vae, loss, steps, VAE_LEARNING_RATE, "VAE", progress)


@torch.no_grad()
def standardize_latents(vae: Any, images_BCHW: Tensor) -> None:
    """Sets the VAE's shift and scale so that latents have mean 0 and standard deviation 1."""
    latents_BCHW = vae.encode(images_BCHW).latent_dist.mean
    vae.register_to_config(
        shift_factor=float(latents_BCHW.mean()), scaling_factor=1 / max(float(latents_BCHW.std()), 1e-6)
    )


def train_transformer(model: SD3Model, numbers: list[int], steps: int, draws: Draws, progress: Progress) -> None:
    """Flow matching: the velocity from image to noise, at a random sigma."""
    vae, generator = model.vae, draws.generator

    def loss() -> Tensor:
        chosen = draws.random.choices(numbers, k=BATCH)
        with torch.no_grad():
            encoded_BL = vae.encode(draw_numbers(chosen, draws.random)).latent_dist.sample(generator)
        clean_BL = (encoded_BL - vae.config.shift_factor) * vae.config.scaling_factor
        noise_BL = torch.randn(clean_BL.shape, generator=generator)
        sigma_B = torch.randn(BATCH, generator=generator).sigmoid()
        sigma_BL = sigma_B[:, None, None, None]
        noised_BL = (1 - sigma_BL) * clean_BL + sigma_BL * noise_BL
        conditioning = model.encode([prompt_of(number) for number in chosen])
        velocity_BL = model.velocity(noised_BL, 1000 * sigma_B, conditioning, 1.0, SIZE)
        distance: Tensor = (velocity_BL - (noise_BL - clean_BL)).square().mean()
        return distance

    minimize(model.transformer, loss, steps, LEARNING_RATE, "transformer", progress)


def minimize(
    module: nn.Module, loss: Callable[[], Tensor], steps: int, learning_rate: float, name: str, progress: Progress
) -> None:
    """AdamW with a warm-up and a cosine decay to a twentieth of the learning rate."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=1e-4)
    task = progress.add_task(name, total=steps, loss="")
    for step in range(steps):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        factor = min(1.0, (step + 1) / WARM_UP) * (0.05 + 0.95 * cosine)
        for group in optimizer.param_groups:
            group["lr"] = factor * learning_rate
        value = loss()
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        progress.update(task, advance=1, loss=f"loss {value.item():.4f}")


def main() -> None:
    """Trains, saves, and prints how many numbers are legible."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=VAE_STEPS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the transformer")
    given = parser.parse_args()
    share = pretrain(given.directory, given.seed, given.vae_steps, given.steps)
    print(f"{given.directory}: {share:.1%} of the held-out numbers are read exactly")


if __name__ == "__main__":
    main()
