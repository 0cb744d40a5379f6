"""DeQA-Score: the perceived quality of an image, by mPLUG-Owl2 (https://github.com/zhiyuanyou/DeQA-Score).

The model's code is in its repository on the hub and runs here, at a pinned commit. It needs an old transformers:
serve this reward in a separate environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.models import DeqaSettings
from digenrl.rewards.contract import FrameReward, Metadata, RewardBatch, as_pil
from digenrl.rewards.parts.weights import load_pretrained, pick_device

BEST = 5.0  # scores are from 1 to 5


class DeqaReward(FrameReward):
    """The score as a share of the best one, as in Flow-GRPO."""

    def __init__(self, settings: DeqaSettings) -> None:
        super().__init__(settings.shown_as, settings.frame_stride)
        self.batch_size = settings.batch_size
        wanted = settings.packages[0].partition("==")[2]
        if version("transformers") != wanted:
            raise ConfigError(
                f"reward '{settings.shown_as}': the model's code needs transformers {wanted}, found "
                f"{version('transformers')}; serve it with `digenrl reward serve --env DIR`"
            )
        self._model = load_pretrained(
            AutoModelForCausalLM.from_pretrained,
            settings.model,
            revision=settings.revision,
            code_revision=settings.revision,  # otherwise code that is in another repository is not pinned
            trust_remote_code=settings.trust_remote_code,
            attn_implementation="eager",
            torch_dtype=getattr(torch, settings.dtype),
        )
        self._model.to(pick_device(settings.device)).eval()

    @torch.inference_mode()
    def score_frames(
        self, frames_NCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> RewardBatch:
        values: list[float] = []
        for start in range(0, len(frames_NCHW), self.batch_size):
            images = list(as_pil(frames_NCHW[start : start + self.batch_size]))
            values += (self._model.score(images).float() / BEST).tolist()
        return RewardBatch(tuple(values))


build = DeqaReward
