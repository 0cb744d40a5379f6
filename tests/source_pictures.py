"""Source images for tests, and prompts encoded with them by families that take some."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from PIL import Image

from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.registry import FAMILIES


def picture(seed: int, height: int, width: int) -> Image.Image:
    """Random pixels, the same for the same seed."""
    pixels = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def pictures_for(model: PipelineModel, prompts: Sequence[str], size: SampleSize) -> list[list[Image.Image]]:
    """At most two source images for every prompt, in a size that the diffusers pipeline leaves as it is."""
    count, source = min(2, FAMILIES[model.family].sources.most), model.pipeline_source_size(size)
    return [
        [picture(100 * row + index, source.height, source.width) for index in range(count)]
        for row in range(len(prompts))
    ]


def encoded(model: PipelineModel, prompts: Sequence[str], size: SampleSize) -> Conditioning:
    """Prompts with source images, if the family takes any; those are encoded one by one, as in a run."""
    images = pictures_for(model, prompts, size)
    if not images[0]:
        return model.encode(prompts)
    rows = [model.encode_with_images([prompt], [own], size) for prompt, own in zip(prompts, images, strict=True)]
    return Conditioning.joined(rows)
