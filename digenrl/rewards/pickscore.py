"""PickScore: CLIP-H fine-tuned on pairwise choices; the score is the logit, exp(logit_scale) * cosine."""

from __future__ import annotations

from digenrl.config.rewards.models import LAION_CLIP_H, PickScoreSettings
from digenrl.rewards.parts.clip import ClipPairReward, load_clip, processor_of


def build(settings: PickScoreSettings) -> ClipPairReward:
    """Loads the model and uses its learned scale."""
    model = load_clip(settings)
    scale = float(model.logit_scale.detach().float().exp())
    return ClipPairReward(settings, model, processor_of(settings, published=LAION_CLIP_H), scale)
