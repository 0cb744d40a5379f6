"""Rewards images in which the expected text can be read. The recognizer's weights are in its package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from PIL import Image
from rapidocr import RapidOCR
from torch import Tensor

from digenrl.config.rewards.table import OcrSettings, TextMatch
from digenrl.rewards.contract import FrameReward, Metadata, RewardBatch, all_wanted, as_pil

LINE_HEIGHT = 48  # pixels of the recognizer's input
LINES_PER_BATCH = 16  # larger batches are not faster
LEAST_CONFIDENCE = 0.5  # below this a line does not count as read; the recognizer's default


class OcrReward(FrameReward):
    """The similarity of the expected text and what was read, by `match`, plus the exact bonus for equal texts.

    Letter case and white space are ignored. The expected text is `metadata["text"]`, or everything in double
    quotes in the prompt. An image without readable text scores 0; a sample without an expected text is an error.
    """

    def __init__(self, settings: OcrSettings) -> None:
        super().__init__(settings.shown_as, settings.frame_stride)
        self._settings = settings
        self.match, self.frame_mean = settings.match, settings.frame_mean
        self.exact_bonus = settings.exact_bonus
        self.detect = settings.detect
        self.shorter_side = settings.shorter_side
        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",  # otherwise an image without text is a warning
                "Global.text_score": LEAST_CONFIDENCE,
                "EngineConfig.onnxruntime.intra_op_num_threads": settings.threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Det.limit_side_len": settings.shorter_side,
                "Rec.rec_img_shape": [3, LINE_HEIGHT, settings.width],
                "Rec.rec_batch_num": LINES_PER_BATCH,
            }
        )

    def score_frames(
        self, frames_NCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> RewardBatch:
        expected = [normalized(text) for text in all_wanted(self._settings, prompts, metadata)]
        read = [normalized(text) for text in self.read(list(as_pil(frames_NCHW)))]
        pairs = list(zip(expected, read, strict=True))
        similarity = tuple(text_similarity(want, got, self.match) for want, got in pairs)
        exact = tuple(float(want == got) for want, got in pairs)
        values = tuple(near + self.exact_bonus * same for near, same in zip(similarity, exact, strict=True))
        return RewardBatch(values, {"similarity": similarity, "exact": exact})

    def counts(self, frame_score: float) -> bool:
        return self.frame_mean == "all" or frame_score > 0

    def read(self, images: Sequence[Image.Image]) -> list[str]:
        """The text of each image, empty if there is none; lines in reading order, joined by spaces."""
        if self.detect:
            return [" ".join(self._engine(_as_bgr(self._upscaled(image))).txts or ()) for image in images]
        # No upscaling: the recognizer itself scales every image to its line height, bilinearly.
        lines = self._engine.recognize_txt([_as_bgr(image) for image in images])
        read = zip(lines.txts, lines.scores, strict=True)
        return [text if confidence >= LEAST_CONFIDENCE else "" for text, confidence in read]

    def _upscaled(self, image: Image.Image) -> Image.Image:
        """Bilinear: text of 8 to 14 pixels is recognized better than without scaling or with a sharper filter."""
        factor = self.shorter_side / min(image.size)
        if factor <= 1:
            return image
        return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BILINEAR)


def _as_bgr(image: Image.Image) -> Any:
    """(height, width, 3) in the channel order that the recognizer expects."""
    return numpy.ascontiguousarray(numpy.asarray(image)[:, :, ::-1])


def normalized(text: str) -> str:
    """The text without letter case and whitespace."""
    return "".join(text.casefold().split())


def text_similarity(expected: str, read: str, match: TextMatch) -> float:
    """From 0 to 1, for texts that are `normalized`.

    >>> [round(text_similarity("open", "open24h", match), 3) for match in ("contained", "target", "whole")]
    [1.0, 0.25, 0.571]
    """
    if match == "contained" and expected in read:
        return 1.0
    length = max(len(expected), len(read)) if match == "whole" else len(expected)
    return 1 - min(edit_distance(expected, read), length) / length


def edit_distance(first: str, second: str) -> int:
    """The Levenshtein distance: the fewest insertions, deletions and replacements of one character."""
    above = list(range(len(second) + 1))
    for row, letter in enumerate(first, start=1):
        current = [row]
        for column, other in enumerate(second, start=1):
            replaced = above[column - 1] + (letter != other)
            current.append(min(above[column] + 1, current[column - 1] + 1, replaced))
        above = current
    return above[-1]


build = OcrReward
