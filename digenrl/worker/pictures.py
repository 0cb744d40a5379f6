"""Pixels as PNG and MP4 files. Shape legend: B = samples, F = frames, C = 3 colours, H, W."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy
from PIL import Image
from torch import Tensor

from digenrl.worker.clips import ClipError, mp4_encoder, write_clip

_log = logging.getLogger(__name__)


def save_pictures(pixels_BFCHW: Tensor, folder: Path, first: int, shown: int) -> None:
    """One PNG per sample whose index is below `shown`, named by its index.

    For a video, this is the middle frame, with an MP4 of the same name beside it if an encoder is installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for row in range(max(0, min(len(pixels_BFCHW), shown - first))):
        path = folder / f"{first + row:04d}.png"
        as_image(pixels_BFCHW[row]).save(path)
        if pixels_BFCHW.shape[1] > 1 and mp4_encoder() is not None:
            _write_clip(pixels_BFCHW[row], path.with_suffix(".mp4"))


def _write_clip(pixels_FCHW: Tensor, path: Path) -> None:
    """Without a clip, an evaluation still has its scores and images."""
    try:
        write_clip(pixels_FCHW, path)
    except ClipError as error:
        _log.warning("%s", error)


def as_image(pixels_FCHW: Tensor) -> Image.Image:
    """The middle frame."""
    frame_HWC = pixels_FCHW[len(pixels_FCHW) // 2].permute(1, 2, 0)
    return Image.fromarray((frame_HWC.numpy() * 255).round().clip(0, 255).astype(numpy.uint8))
