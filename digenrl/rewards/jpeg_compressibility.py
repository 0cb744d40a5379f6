"""Rewards images with small JPEG files: cheap, exact, and a good first test of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from PIL import Image
from torch import Tensor

from digenrl.config.rewards.table import JpegCompressibilitySettings
from digenrl.rewards.contract import FrameReward, Metadata, RewardBatch, as_pil


class JpegReward(FrameReward):
    """`sign` times the size of the JPEG file in kilobytes (1000 bytes)."""

    def __init__(self, label: str, frame_stride: int, quality: int, sign: int) -> None:
        super().__init__(label, frame_stride)
        self.quality = quality
        self.sign = sign

    def score_frames(
        self, frames_NCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> RewardBatch:
        kilobytes = tuple(self._kilobytes(image) for image in as_pil(frames_NCHW))
        return RewardBatch(tuple(self.sign * size for size in kilobytes), {"kilobytes": kilobytes})

    def _kilobytes(self, image: Image.Image) -> float:
        file = BytesIO()
        image.save(file, format="JPEG", quality=self.quality)
        return file.tell() / 1000


def build(settings: JpegCompressibilitySettings) -> JpegReward:
    return JpegReward(settings.shown_as, settings.frame_stride, settings.quality, sign=-1)
