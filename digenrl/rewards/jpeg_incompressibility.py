"""Rewards images with large JPEG files."""

from __future__ import annotations

from digenrl.config.rewards.table import JpegIncompressibilitySettings
from digenrl.rewards.jpeg_compressibility import JpegReward


def build(settings: JpegIncompressibilitySettings) -> JpegReward:
    return JpegReward(settings.shown_as, settings.frame_stride, settings.quality, sign=1)
