"""Rewards for tests of whole runs: fast, different for every sample, and able to wait or fail."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor


def redness(pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    """How red samples are."""
    assert gc.isenabled(), "it is off only while a process loads its modules"
    red_B = pixels_BFCHW[:, :, 0].mean(dim=(1, 2, 3)) - pixels_BFCHW[:, :, 1:].mean(dim=(1, 2, 3, 4))
    return [float(value) for value in red_B]


def redness_rank(pixels_BFCHW: Tensor, prompt: str, metadata: Any) -> list[float]:
    """From 0 for the least red sample of a group to 1 for the reddest."""
    reds = redness(pixels_BFCHW, [prompt], [metadata])
    return [sum(other < red for other in reds) / (len(reds) - 1) for red in reds]


def gated(pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Any], gates: str) -> list[float]:
    """Redness; a prompt waits while the folder `gates` has a file of its name."""
    while any((Path(gates) / prompt).exists() for prompt in prompts):
        time.sleep(0.01)
    return redness(pixels_BFCHW, prompts, metadata)


def refuses(pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Any], prompt: str) -> list[float]:
    """Redness; fails for one prompt."""
    if prompt in prompts:
        raise ValueError(f"nothing to see in {prompt!r}")
    return redness(pixels_BFCHW, prompts, metadata)


def broken(pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    """Always fails."""
    raise ConnectionError("the scorer is away")


def closeness(pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    """Minus the distance between the mean color of a sample and that of its source image."""
    sources = [one["source_images"][0].mean(dim=(1, 2)) for one in metadata]
    colors = pixels_BFCHW.mean(dim=(1, 3, 4))
    return [-float((color - source).abs().sum()) for color, source in zip(colors, sources, strict=True)]
