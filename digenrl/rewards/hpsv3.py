"""HPSv3: a human preference score by Qwen2-VL, run by the authors' package (https://github.com/MizzenAI/HPSv3).

The package holds the prompt and the model's head, and needs an old transformers: serve this reward in a
separate environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from hpsv3 import HPSv3RewardInferencer
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.models import HpsV3Settings
from digenrl.rewards.contract import FrameReward, Metadata, RewardBatch, as_pil
from digenrl.rewards.parts.weights import pick_device


class HpsV3Reward(FrameReward):
    """The mean of the predicted distribution of preference; the part `sigma` is the model's second output."""

    def __init__(self, settings: HpsV3Settings) -> None:
        super().__init__(settings.shown_as, settings.frame_stride)
        self.batch_size = settings.batch_size
        for path in (settings.checkpoint, settings.config):
            if path is not None and not Path(path).expanduser().is_file():
                raise ConfigError(f"reward '{settings.shown_as}': {path}: no such file")
        # The package takes None for its own defaults.
        config, checkpoint = (
            None if path is None else str(Path(path).expanduser())
            for path in (settings.config, settings.checkpoint)
        )
        device = str(pick_device(settings.device))
        self._inferencer = HPSv3RewardInferencer(config_path=config, checkpoint_path=checkpoint, device=device)

    @torch.inference_mode()
    def score_frames(
        self, frames_NCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> RewardBatch:
        rows: list[list[float]] = []
        for start in range(0, len(prompts), self.batch_size):
            images = list(as_pil(frames_NCHW[start : start + self.batch_size]))
            texts = list(prompts[start : start + self.batch_size])
            rows += self._inferencer.reward(image_paths=images, prompts=texts).float().tolist()
        return RewardBatch(tuple(row[0] for row in rows), {"sigma": tuple(row[1] for row in rows)})


build = HpsV3Reward
