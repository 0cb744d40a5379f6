"""Encodes a prompt for a recipe, with its source images if it has any, and resizes its images."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from digenrl.models.contract import Conditioning, TextEncoder
from digenrl.prompts.source_images import read_images
from digenrl.worker.blueprint import Blueprint


def source_images(
    blueprint: Blueprint, contents: Sequence[bytes], where: str, held_out: bool
) -> tuple[Image.Image, ...]:
    """Source images, decoded and resized for the samples of training or of the evaluation."""
    size = blueprint.held_out_size if held_out else blueprint.size
    return read_images(contents, where, size.height, size.width, blueprint.recipe.sample.source_size)


def paired_images(blueprint: Blueprint, contents: Sequence[bytes], where: str) -> tuple[Image.Image, ...]:
    """The images of a pair, decoded, scaled to cover the size of a sample and cropped to it."""
    return read_images(contents, where, blueprint.size.height, blueprint.size.width, "crop")


def encode_prompt(
    blueprint: Blueprint, encoder: TextEncoder, text: str, images: Sequence[Image.Image], held_out: bool
) -> Conditioning:
    """One row, with the recipe's negative prompt."""
    negative = blueprint.recipe.model.negative_prompt
    negatives = None if negative is None else [negative]
    if not images:
        return encoder.encode([text], negatives)
    size = blueprint.held_out_size if held_out else blueprint.size
    return encoder.encode_with_images([text], [images], size, negatives)
