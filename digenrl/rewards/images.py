"""Images of a reward as Pillow's."""

from __future__ import annotations

from collections.abc import Iterator

from PIL import Image
from torch import Tensor


def as_pil(frames_NCHW: Tensor) -> Iterator[Image.Image]:
    """uint8 frames as RGB images, one by one."""
    for frame_CHW in frames_NCHW:
        yield Image.fromarray(frame_CHW.permute(1, 2, 0).contiguous().numpy())
