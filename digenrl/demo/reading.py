"""How many numbers the demo model writes so that they can be read: Euler steps, no guidance, noise from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.config.rewards import OcrSettings
from digenrl.demo.drawing import HEIGHT, WIDTH
from digenrl.generation.noise import initial_noise
from digenrl.models.contract import DiffusionModel, SampleSize
from digenrl.records import SampleId
from digenrl.rewards.contract import Reward
from digenrl.rewards.ocr import OcrReward

SIZE = SampleSize(height=HEIGHT, width=WIDTH)
EVALUATION_STEPS = 10
ROWS_AT_ONCE = 50


def number_reader() -> OcrReward:
    """The OCR reward for pictures that are one line of text."""
    return OcrReward(OcrSettings(detect=False, width=96))


def exact_share(model: DiffusionModel, prompts: Sequence[str], seed: int, reader: Reward) -> float:
    """The share of prompts, one sample each, whose text is read without a mistake."""
    exact: list[float] = []
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        rows = list(prompts[first : first + ROWS_AT_ONCE])
        pixels_BFCHW = sample_pictures(model, rows, seed, first)
        exact += reader.score(pixels_BFCHW, rows, [{}] * len(rows)).parts["exact"]
    return sum(exact) / len(exact)


@torch.no_grad()
def sample_pictures(model: DiffusionModel, prompts: Sequence[str], seed: int, first: int = 0) -> Tensor:
    """One sample per prompt, (B, 1, 3, H, W) in [0, 1]; the noise of prompt i is that of number `first` + i."""
    samples = [SampleId(step=0, group=first + row, index=0) for row in range(len(prompts))]
    conditioning = model.encode(prompts)
    schedule = model.schedule(EVALUATION_STEPS, SIZE)
    noise_B = initial_noise(seed, samples, model.noise_shape(SIZE), same_in_group=False)
    latents_BL = model.initial_latents(noise_B, SIZE)
    for index, timestep in enumerate(schedule.timesteps):
        step = schedule.sigmas[index + 1] - schedule.sigmas[index]
        timesteps_B = timestep.expand(len(prompts))
        latents_BL = latents_BL + step * model.velocity(latents_BL, timesteps_B, conditioning, 1.0, SIZE)
    return model.decode(latents_BL, SIZE)
