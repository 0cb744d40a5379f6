"""LAION's aesthetic predictor: CLIP-L's image embedding at unit length, scored from about 1 to 10 by a head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from digenrl.config.rewards.models import AestheticSettings
from digenrl.rewards.contract import FrameReward, Metadata, RewardBatch
from digenrl.rewards.parts.clip import ClipImages, load_clip, processor_of
from digenrl.rewards.parts.score_head import ScoreHead
from digenrl.rewards.parts.weights import pick_device, read_state_dict


class AestheticReward(FrameReward):
    """The predicted aesthetic score of an image; prompts are ignored."""

    def __init__(self, settings: AestheticSettings) -> None:
        super().__init__(settings.shown_as, settings.frame_stride)
        self.batch_size = settings.batch_size
        self.device = pick_device(settings.device)
        head_file = Path(settings.head).expanduser()
        head_state = read_state_dict(head_file)  # small: a wrong file fails before the backbone loads
        model = load_clip(settings)
        self.vision = model.vision_model.to(self.device).eval().requires_grad_(False)
        self.projection = model.visual_projection.to(self.device).requires_grad_(False)
        self.head = ScoreHead.from_state(head_state, self.projection.out_features, head_file).to(self.device)
        self._images = ClipImages(processor_of(settings))

    @torch.inference_mode()
    def score_frames(
        self, frames_NCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> RewardBatch:
        scores: list[float] = []
        for batch_NCHW in torch.split(frames_NCHW, self.batch_size):
            pixel_values = self._images(batch_NCHW).to(self.device, self.vision.dtype)
            embeds_ND = self.projection(self.vision(pixel_values=pixel_values).pooler_output).float()
            scores += self.head(normalize(embeds_ND, dim=-1)).tolist()
        return RewardBatch(tuple(scores))


build = AestheticReward
