"""Pixels as PNG and MP4 files. Shape legend: B = samples, F = frames, C = 3 colors, H, W."""

from __future__ import annotations

import io
import logging
import tempfile
from pathlib import Path

import numpy
from PIL import Image
from torch import Tensor

from digenrl.worker.clips import ClipError, mp4_encoder, write_clip

_log = logging.getLogger(__name__)


def picture_files(pixels_BFCHW: Tensor, first: int, shown: int) -> dict[str, bytes]:
    """One PNG per sample whose index is below `shown`, by its index, as the contents of files by name.

    For a video, this is the middle frame, with an MP4 of the same name beside it if an encoder is installed.
    """
    files: dict[str, bytes] = {}
    for row in range(max(0, min(len(pixels_BFCHW), shown - first))):
        name, image = f"{first + row:04d}", io.BytesIO()
        as_image(pixels_BFCHW[row]).save(image, format="PNG")
        files[f"{name}.png"] = image.getvalue()
        if pixels_BFCHW.shape[1] > 1 and mp4_encoder() is not None:
            files |= _clip_file(pixels_BFCHW[row], f"{name}.mp4")
    return files


def _clip_file(pixels_FCHW: Tensor, name: str) -> dict[str, bytes]:
    """Empty if the encoder fails: an evaluation still has its scores and images."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        try:
            write_clip(pixels_FCHW, path)
        except ClipError as error:
            _log.warning("%s", error)
            return {}
        return {name: path.read_bytes()}


def as_image(pixels_FCHW: Tensor) -> Image.Image:
    """The middle frame."""
    frame_HWC = pixels_FCHW[len(pixels_FCHW) // 2].permute(1, 2, 0)
    return Image.fromarray((frame_HWC.numpy() * 255).round().clip(0, 255).astype(numpy.uint8))
