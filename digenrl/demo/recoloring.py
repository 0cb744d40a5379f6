"""The reward of the editing demo: how closely a sample is its source with one shape in another color.

Shape legend: B = samples, F = frames, C = 3 colors, H and W = height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from digenrl.rewards.contract import SOURCE_IMAGES, RewardBatch


def recolored(pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> RewardBatch:
    """1 minus the mean errors inside and outside of the shape; 1 is a perfect edit.

    Metadata has the colors `background`, `from` and `to`, from 0 to 255. Parts: both errors.
    """
    errors = [
        _errors(pixels_FCHW.mean(dim=0), one) for pixels_FCHW, one in zip(pixels_BFCHW, metadata, strict=True)
    ]
    inside, outside = (tuple(float(error) for error in part) for part in zip(*errors, strict=True))
    values = tuple(1 - one - other for one, other in zip(inside, outside, strict=True))
    return RewardBatch(values, {"inside": inside, "outside": outside})


def _errors(pixels_CHW: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
    """Mean absolute differences from the wanted picture, where the shape is and elsewhere."""
    source_CHW = metadata[SOURCE_IMAGES][0].to(pixels_CHW)
    background, old, new = (
        torch.tensor(metadata[key]).to(pixels_CHW)[:, None, None] / 255 for key in ("background", "from", "to")
    )
    direction = old - background
    cover_HW = ((source_CHW - background) * direction).sum(dim=0) / direction.square().sum()
    cover_HW = cover_HW.clamp(0, 1)  # of a pixel by the shape; edges are smooth
    difference_HW = (pixels_CHW - (source_CHW + cover_HW * (new - old))).abs().mean(dim=0)
    inside = (difference_HW * cover_HW).sum() / cover_HW.sum()
    outside = (difference_HW * (1 - cover_HW)).sum() / (1 - cover_HW).sum()
    return inside, outside
