"""The number of faces, by the cascade of local binary patterns that scikit-image contains. Frontal faces only."""

from __future__ import annotations

from collections.abc import Sequence

from skimage import data
from skimage.feature import Cascade
from torch import Tensor

from digenrl.config.rewards.table import FaceCountSettings
from digenrl.rewards.contract import FrameReward, Metadata, RewardBatch, all_wanted

LARGER_BY = 1.2  # from one window size to the next
STEP = 1.0  # of a window, in its smallest pixels


class FaceCountReward(FrameReward):
    """1 minus the error of the count, as a share of the wanted count; at least 0. Parts: `faces` and `exact`."""

    def __init__(self, settings: FaceCountSettings) -> None:
        super().__init__(settings.shown_as, settings.frame_stride)
        self._settings = settings
        self._cascade = Cascade(data.lbp_frontal_face_cascade_filename())

    def score_frames(
        self, frames_NCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> RewardBatch:
        wanted_counts = all_wanted(self._settings, prompts, metadata)
        found = [self._count(frame_CHW) for frame_CHW in frames_NCHW]
        errors = [
            abs(count - wanted_count) / max(wanted_count, 1)
            for count, wanted_count in zip(found, wanted_counts, strict=True)
        ]
        parts = {
            "faces": tuple(float(count) for count in found),
            "exact": tuple(float(error == 0) for error in errors),
        }
        return RewardBatch(tuple(max(0.0, 1 - error) for error in errors), parts)

    def _count(self, frame_CHW: Tensor) -> int:
        largest = min(frame_CHW.shape[1:])
        smallest = max(1, round(self._settings.smallest * largest))
        boxes = self._cascade.detect_multi_scale(
            img=frame_CHW.permute(1, 2, 0).contiguous().numpy(),
            scale_factor=LARGER_BY,
            step_ratio=STEP,
            min_size=(smallest, smallest),
            max_size=(largest, largest),
        )
        return len(boxes)


build = FaceCountReward
