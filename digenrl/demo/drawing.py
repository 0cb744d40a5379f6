"""The pictures that the demo model learns from: dark four-digit numbers on light ground, 64 x 32 pixels."""

from __future__ import annotations

from functools import lru_cache
from random import Random

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

HEIGHT, WIDTH = 32, 64
LETTER_SIZES = (20, 21, 22, 23, 24)  # in pixels
LARGEST_SHIFT = 2  # pixels from the middle


def prompt_of(number: int) -> str:
    """The prompt that asks for a number.

    >>> prompt_of(4071)
    'a sign that says "4071"'
    """
    return f'a sign that says "{number}"'


def draw_numbers(numbers: list[int], random: Random) -> Tensor:
    """One picture per number, as a VAE takes them: (N, 3, 32, 64) in [-1, 1]. Size, place and colours vary."""
    pixels_NHWC = numpy.stack([numpy.asarray(draw_number(number, random)) for number in numbers])
    return torch.from_numpy(pixels_NHWC).permute(0, 3, 1, 2).float() / 127.5 - 1


def draw_number(number: int, random: Random) -> Image.Image:
    """One picture."""
    ground = tuple(random.randint(215, 255) for _ in range(3))
    ink = tuple(random.randint(0, 60) for _ in range(3))
    x, y = (side / 2 + random.uniform(-LARGEST_SHIFT, LARGEST_SHIFT) for side in (WIDTH, HEIGHT))
    image = Image.new("RGB", (WIDTH, HEIGHT), ground)
    font = _font(random.choice(LETTER_SIZES))
    ImageDraw.Draw(image).text((x, y), str(number), fill=ink, font=font, anchor="mm")
    return image


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font that comes with Pillow."""
    return ImageFont.load_default(size=size)
