"""Cosine of image and prompt under CLIP, as it is: at most 1, with no clamp at 0 that would hide a gradient."""

from __future__ import annotations

from digenrl.config.rewards import ClipScoreSettings
from digenrl.rewards.clip import ClipPairReward, load_clip, processor_of


def build(settings: ClipScoreSettings) -> ClipPairReward:
    """Loads the model."""
    return ClipPairReward(settings, load_clip(settings), processor_of(settings))
