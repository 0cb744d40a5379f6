"""Encodes a prompt for a recipe, with its source images if it has any, and reads its images."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from digenrl.config.rewards.base import source_image_key
from digenrl.models.contract import Conditioning, TextEncoder
from digenrl.prompts.source_images import named_images, read_images
from digenrl.records import PromptRow
from digenrl.worker.blueprint import Blueprint


def source_images(
    blueprint: Blueprint, contents: Sequence[bytes], where: str, held_out: bool
) -> tuple[Image.Image, ...]:
    """Source images, decoded and resized for the samples of training or of the evaluation."""
    size = blueprint.held_out_size if held_out else blueprint.size
    return read_images(contents, where, size.height, size.width, blueprint.recipe.sample.source_size)


def images_for_rewards(blueprint: Blueprint, prompt: PromptRow, held_out: bool) -> tuple[Image.Image, ...]:
    """The source images of a prompt without any: those whose paths its metadata has for a reward.

    Rewards never open paths themselves: on a server, those would be the client's.
    """
    recipe = blueprint.recipe
    key = source_image_key(recipe.held_out_rewards if held_out else recipe.rewards)
    if key is None:
        return ()
    evaluation = recipe.evaluation
    settings = recipe.prompts if evaluation is None or not prompt.held_out else evaluation.prompts
    return named_images(prompt.metadata, key, settings, prompt.where)


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
