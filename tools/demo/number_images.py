"""The training images of the demo model: dark four-digit numbers on a light background, 64 x 32 pixels."""

from __future__ import annotations

from functools import lru_cache
from random import Random

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

HEIGHT, WIDTH = 32, 64
FONT_SIZES = (20, 21, 22, 23, 24)  # in pixels
MAX_OFFSET = 2  # pixels from the center


def prompt_of(number: int) -> str:
    """The prompt for a number.

    >>> prompt_of(4071)
    'a sign that says "4071"'
    """
    return f'a sign that says "{number}"'


def draw_numbers(numbers: list[int], random: Random) -> Tensor:
    """One image per number, as input of a VAE: (N, 3, 32, 64) in [-1, 1]. Size, position and colors vary."""
    pixels_NHWC = numpy.stack([numpy.asarray(draw_number(number, random)) for number in numbers])
    return torch.from_numpy(pixels_NHWC).permute(0, 3, 1, 2).float() / 127.5 - 1


def draw_number(number: int, random: Random) -> Image.Image:
    """An image of one number."""
    background = tuple(random.randint(215, 255) for _ in range(3))
    ink = tuple(random.randint(0, 60) for _ in range(3))
    x, y = (side / 2 + random.uniform(-MAX_OFFSET, MAX_OFFSET) for side in (WIDTH, HEIGHT))
    image = Image.new("RGB", (WIDTH, HEIGHT), background)
    font = _font(random.choice(FONT_SIZES))
    ImageDraw.Draw(image).text((x, y), str(number), fill=ink, font=font, anchor="mm")
    return image


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)
