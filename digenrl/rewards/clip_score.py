"""Cosine similarity of image and prompt under CLIP, at most 1, without the usual clamp at 0."""

from __future__ import annotations

from digenrl.config.rewards.models import ClipScoreSettings
from digenrl.rewards.parts.clip import ClipPairReward, load_clip, processor_of


def build(settings: ClipScoreSettings) -> ClipPairReward:
    return ClipPairReward(settings, load_clip(settings), processor_of(settings))
