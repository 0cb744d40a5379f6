"""Measures how many numbers the demo model writes legibly: Euler steps, no guidance, noise from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from number_images import HEIGHT, WIDTH
from torch import Tensor

from digenrl.config.recipes.windows import EulerOnly
from digenrl.config.rewards.table import OcrSettings
from digenrl.generation.rollout import RolloutSettings, generate_pixels
from digenrl.generation.windows import plan_rollouts
from digenrl.models.contract import DiffusionModel, SampleSize
from digenrl.models.trajectory import StepNoise
from digenrl.records import SampleId
from digenrl.rewards.contract import Reward
from digenrl.rewards.ocr import OcrReward

SIZE = SampleSize(height=HEIGHT, width=WIDTH)
EVALUATION_STEPS = 10
BATCH = 50


def number_reader() -> OcrReward:
    """The OCR reward for images that are one line of text."""
    return OcrReward(OcrSettings(detect=False, width=96))


def exact_share(model: DiffusionModel, prompts: Sequence[str], seed: int, reader: Reward) -> float:
    """The share of prompts, one sample each, whose text is read without a mistake."""
    exact: list[float] = []
    for first in range(0, len(prompts), BATCH):
        rows = list(prompts[first : first + BATCH])
        pixels_BFCHW = sample_images(model, rows, seed, first)
        exact += reader.score(pixels_BFCHW, rows, [{}] * len(rows)).parts["exact"]
    return sum(exact) / len(exact)


@torch.no_grad()
def sample_images(model: DiffusionModel, prompts: Sequence[str], seed: int, first: int = 0) -> Tensor:
    """One sample per prompt, (B, 1, 3, H, W) in [0, 1]. Prompt i has the noise of group `first` + i."""
    samples = [SampleId(step=0, group=first + row, index=0) for row in range(len(prompts))]
    plans = plan_rollouts(
        EulerOnly(),
        samples,
        schedule=model.schedule(EVALUATION_STEPS, SIZE),
        size=SIZE,
        noise=StepNoise("flow", level=0.0),
        guidance=1.0,
        run_seed=seed,
    )
    return generate_pixels(model, model.encode(prompts), plans, samples, RolloutSettings(seed))
