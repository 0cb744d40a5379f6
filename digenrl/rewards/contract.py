"""The contract of a reward: samples in, one finite number per sample out, or an error that names the sample.

Shape legend: B = samples, F = frames of a sample (an image has one), N = single images, C = 3 colors, H and W =
height and width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from digenrl.config.rewards.base import SOURCE_IMAGES as SOURCE_IMAGES
from digenrl.config.rewards.base import RewardSettings

if TYPE_CHECKING:
    from PIL import Image

Metadata = Mapping[str, Any]
# The metadata key of a sample that is an image of a pair: True for the chosen image, False for the rejected one.
PREFERRED = "preferred"
ROUNDING = 1e-4  # how far the pixels of a decoder may exceed [0, 1]


class RewardError(RuntimeError):
    """There is no usable score. The caller discards the samples; no number ever replaces a missing score.

    `samples` are positions in the batch; empty if the whole batch failed.
    """

    def __init__(self, reward: str, reason: str, samples: tuple[int, ...] = ()) -> None:
        super().__init__(reward, reason, samples)  # all three are args, so that it can be pickled
        self.reward = reward
        self.reason = reason
        self.samples = samples

    def __str__(self) -> str:
        numbers = ", ".join(str(index) for index in self.samples)
        where = (
            f"sample {numbers}" if len(self.samples) == 1 else f"samples {numbers}" if numbers else "all samples"
        )
        return f"reward '{self.reward}', {where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """One value per sample, and named components that explain it, each with one number per sample."""

    values: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, part in self.parts.items():
            if len(part) != len(self.values):
                raise ValueError(f"part '{name}' has {len(part)} numbers for {len(self.values)} values")


class Reward(ABC):
    """A scorer. Callers use `score`; subclasses implement `_score`."""

    def __init__(self, label: str) -> None:
        self.label = label

    def score(  # B, F, C, H, W are shape suffixes
        self,
        pixels_BFCHW: Tensor,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
    ) -> RewardBatch:
        """Scores pixels in [0, 1], fp32: exactly one finite value per sample, in the same order.

        Raises RewardError if a sample cannot be scored, and ValueError if the call itself is wrong.
        """
        check_call(pixels_BFCHW, prompts, metadata)
        check_pixels(self.label, pixels_BFCHW)
        try:
            # Scorers get lists of their own: one that changes them does not affect the next reward.
            scores = self._score(pixels_BFCHW, list(prompts), [{**one} for one in metadata])
            return checked(self.label, scores, len(prompts))
        except RewardError:
            raise
        except Exception as error:  # scorers are foreign code: any exception means "no score"
            raise RewardError(self.label, f"{type(error).__name__}: {error}") from error

    @abstractmethod
    def _score(self, pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> RewardBatch:
        """The scores. May raise anything; the result is checked."""


class FrameReward(Reward):
    """A reward of single images. A video scores the mean over frames 0, `frame_stride`, 2 `frame_stride`, ...

    Images are first rounded to 8 bits, so that an image sent as PNG scores the same.
    """

    def __init__(self, label: str, frame_stride: int = 1) -> None:
        super().__init__(label)
        self.frame_stride = frame_stride

    @abstractmethod
    def score_frames(
        self, frames_NCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> RewardBatch:
        """Scores single images, uint8. The samples of a RewardError are rows of N."""

    def counts(self, frame_score: float) -> bool:
        """Whether a frame with this score is part of the mean. A video without any such frame scores 0."""
        return True

    def _score(self, pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> RewardBatch:
        frames_BFCHW = as_uint8(pixels_BFCHW[:, :: self.frame_stride])
        count = frames_BFCHW.shape[1]
        repeated_prompts = [prompt for prompt in prompts for _ in range(count)]
        repeated_metadata = [one for one in metadata for _ in range(count)]
        try:
            scores = self.score_frames(frames_BFCHW.flatten(0, 1), repeated_prompts, repeated_metadata)
            scores = checked(self.label, scores, len(repeated_prompts))
        except RewardError as error:
            samples = tuple(sorted({row // count for row in error.samples}))
            raise RewardError(error.reward, error.reason, samples) from error
        counted = [self.counts(value) for value in scores.values]
        parts = {name: _means(part, counted, count) for name, part in scores.parts.items()}
        return RewardBatch(_means(scores.values, counted, count), parts)


def all_wanted(settings: RewardSettings, prompts: Sequence[str], metadata: Sequence[Metadata]) -> list[Any]:
    """What each sample is compared with; raises RewardError naming the samples whose prompts do not say."""
    found: list[Any] = []
    reasons: dict[int, str] = {}
    for row, (prompt, one) in enumerate(zip(prompts, metadata, strict=True)):
        try:
            found.append(settings.wanted(prompt, one))
        except ValueError as error:
            reasons[row] = str(error)
    if reasons:
        raise RewardError(settings.shown_as, next(iter(reasons.values())), tuple(reasons))
    return found


def as_uint8(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1] as integers from 0 to 255 on the CPU, rounded to the nearest."""
    return (pixels.detach().float() * 255).round().clamp(0, 255).to(device="cpu", dtype=torch.uint8)


def as_pil(frames_CHW: Iterable[Tensor]) -> Iterator[Image.Image]:
    """uint8 frames, or a tensor of some, as RGB images of Pillow."""
    from PIL import Image  # only rewards that use it need Pillow

    for frame_CHW in frames_CHW:
        yield Image.fromarray(frame_CHW.permute(1, 2, 0).contiguous().numpy())


def check_call(pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
    """Raises ValueError unless there are B samples of (frames, 3, height, width), B prompts and B metadata."""
    shape = tuple(pixels_BFCHW.shape)
    if len(shape) != 5 or shape[2] != 3 or 0 in shape:
        raise ValueError(f"expected pixels of shape (samples, frames, 3, height, width), got {shape}")
    if not pixels_BFCHW.is_floating_point():
        raise ValueError(f"expected pixels in [0, 1] as floating point, got {pixels_BFCHW.dtype}")
    if not len(prompts) == len(metadata) == shape[0]:
        raise ValueError(
            f"expected one prompt and one metadata per sample, "
            f"got {shape[0]} samples, {len(prompts)} prompts and {len(metadata)} metadata"
        )


def check_pixels(label: str, pixels_BFCHW: Tensor) -> None:
    """Raises RewardError naming the samples whose pixels are not numbers in [0, 1]."""
    flat = pixels_BFCHW.detach().flatten(1)
    good_B = ((flat >= -ROUNDING) & (flat <= 1 + ROUNDING)).all(dim=1)
    if not bool(good_B.all()):
        bad = tuple(int(index) for index in torch.nonzero(~good_B).flatten())
        raise RewardError(label, "its pixels are not all numbers in [0, 1]; was the sample decoded?", bad)


def checked(label: str, batch: RewardBatch, count: int) -> RewardBatch:
    """The batch as plain numbers; raises RewardError unless it has one finite number per sample everywhere."""
    if not isinstance(batch, RewardBatch):  # scorers are foreign code
        raise RewardError(label, f"expected a RewardBatch from `_score`, got {batch!r:.200}")
    if len(batch.values) != count:
        raise RewardError(
            label, f"returned {len(batch.values)} scores for {count} samples; one per sample is needed"
        )
    for name, numbers in (("the score", batch.values), *((f"part '{n}'", p) for n, p in batch.parts.items())):
        bad = tuple(index for index, number in enumerate(numbers) if not _is_finite(number))
        if bad:
            raise RewardError(label, f"{name} is {numbers[bad[0]]!r}, not a finite number", bad)
    parts = {name: tuple(map(float, part)) for name, part in batch.parts.items()}
    return RewardBatch(tuple(map(float, batch.values)), parts)


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except (TypeError, ValueError):  # no number
        return False


def _means(numbers: Sequence[float], counted: Sequence[bool], count: int) -> tuple[float, ...]:
    """The mean of the counted ones among every `count` consecutive numbers; 0 if none is."""
    means = []
    for at in range(0, len(numbers), count):
        kept = [numbers[row] for row in range(at, at + count) if counted[row]]
        means.append(math.fsum(kept) / len(kept) if kept else 0.0)
    return tuple(means)
