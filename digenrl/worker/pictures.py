"""Pixels as PNG files. Shape legend: B = samples, F = frames, C = 3 colours, H, W."""

from __future__ import annotations

from pathlib import Path

import numpy
from PIL import Image
from torch import Tensor


def save_pictures(pixels_BFCHW: Tensor, folder: Path, first: int, shown: int) -> None:
    """One PNG per sample whose index is below `shown`, named by its index; the middle frame of a video."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in range(max(0, min(len(pixels_BFCHW), shown - first))):
        as_image(pixels_BFCHW[row]).save(folder / f"{first + row:04d}.png")


def as_image(pixels_FCHW: Tensor) -> Image.Image:
    """The middle frame."""
    frame_HWC = pixels_FCHW[len(pixels_FCHW) // 2].permute(1, 2, 0)
    return Image.fromarray((frame_HWC.numpy() * 255).round().clip(0, 255).astype(numpy.uint8))
