"""Source images for tests, and prompts encoded with them by families that take some."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from PIL import Image

from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize
from digenrl.models.registry import FAMILIES


def picture(seed: int, height: int, width: int) -> Image.Image:
    """Random pixels, the same for the same seed."""
    pixels = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def pictures_for(model: DiffusionModel, prompts: Sequence[str]) -> list[list[Image.Image]]:
    """At most two source images for every prompt, of another size than its sample."""
    count = min(2, FAMILIES[model.family].sources.most) if model.family in FAMILIES else 0
    return [[picture(100 * row + index, 32, 64) for index in range(count)] for row in range(len(prompts))]


def encoded(model: DiffusionModel, prompts: Sequence[str], size: SampleSize) -> Conditioning:
    """Prompts with source images, if the family takes any; those are encoded one by one, as in a run."""
    images = pictures_for(model, prompts)
    if not images[0]:
        return model.encode(prompts)
    rows = [model.encode_with_images([prompt], [own], size) for prompt, own in zip(prompts, images, strict=True)]
    return Conditioning.joined(rows)
