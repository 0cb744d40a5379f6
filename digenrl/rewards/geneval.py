"""GenEval: do the detected objects have the counts, colors and positions that the prompt asks for?

Colors are those that CLIP finds most similar to the object, among ten, as in the authors' code. geneval_rules.py
has the rules and names their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoTokenizer

from digenrl.config.rewards.geneval_tasks import COLORS, Task
from digenrl.config.rewards.models import GenevalSettings
from digenrl.rewards.contract import FrameReward, Metadata, RewardBatch, RewardError, all_wanted, as_pil
from digenrl.rewards.parts.clip import ClipImages, load_clip, processor_of
from digenrl.rewards.parts.detectors import DetectorError, find_detector
from digenrl.rewards.parts.geneval_rules import Detection, judge
from digenrl.rewards.parts.weights import load_pretrained, pick_device

BACKGROUND = "#999"  # replaces everything but the object, where the detector has masks
# {0} is the color, {1} the class.
CAPTIONS = ("a photo of a {0} {1}", "a photo of a {0}-colored {1}", "a photo of a {0} object")


class ColorNamer:
    """Names the colors of objects with CLIP: the color whose captions are most similar to the object's crop."""

    def __init__(self, settings: GenevalSettings) -> None:
        self._device = pick_device(settings.device)
        self._model = load_clip(settings).to(self._device).eval().requires_grad_(False)
        self._images = ClipImages(processor_of(settings))
        self._tokenizer = load_pretrained(AutoTokenizer.from_pretrained, processor_of(settings))
        self._captions_by_class: dict[str, Tensor] = {}

    @torch.inference_mode()
    def __call__(self, image: Image.Image, label: str, objects: Sequence[Detection]) -> list[str]:
        if label not in self._captions_by_class:
            self._captions_by_class[label] = self._caption_embeds(label)
        crops = [cropped(image, each) for each in objects]
        pixels = self._images.of_images(crops).to(self._device, self._model.dtype)
        pooled = self._model.vision_model(pixel_values=pixels).pooler_output
        crops_ND = normalize(self._model.visual_projection(pooled).float(), dim=-1)
        nearest_N = (crops_ND @ self._captions_by_class[label].T).argmax(dim=-1)
        return [COLORS[int(index)] for index in nearest_N]

    def _caption_embeds(self, label: str) -> Tensor:
        """(colors, width): the mean of each color's captions, each at unit length, at unit length."""
        texts = [caption.format(color, label) for color in COLORS for caption in CAPTIONS]
        longest = self._model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(
            texts, padding="max_length", truncation=True, max_length=longest, return_tensors="pt"
        ).to(self._device)
        pooled = self._model.text_model(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        ).pooler_output
        embeds = normalize(self._model.text_projection(pooled).float(), dim=-1)
        return normalize(embeds.view(len(COLORS), len(CAPTIONS), -1).mean(dim=1), dim=-1)


def cropped(image: Image.Image, found: Detection) -> Image.Image:
    """The part of the image in the object's box; where there is a mask, on a gray background."""
    if found.mask is not None:
        image = Image.composite(image, Image.new("RGB", image.size, BACKGROUND), found.mask)
    left, top, right, bottom = (round(side) for side in found.box)
    return image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))


class GenevalReward(FrameReward):
    """The share of a task that is right, or whether all of it is, as `score` says; the parts have all verdicts."""

    def __init__(self, settings: GenevalSettings) -> None:
        super().__init__(settings.shown_as, settings.frame_stride)
        self._settings, self.score_by = settings, settings.score
        self.detector = find_detector(settings)
        self.name_colors = ColorNamer(settings)

    def score_frames(
        self, frames_NCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> RewardBatch:
        tasks = all_wanted(self._settings, prompts, metadata)
        self._check_labels(tasks)
        images = list(as_pil(frames_NCHW))
        try:
            found = self.detector.detect(images)
        except DetectorError as error:
            raise RewardError(self.label, str(error)) from None
        verdicts = [
            judge(task, objects, partial(self.name_colors, image))
            for task, objects, image in zip(tasks, found, images, strict=True)
        ]
        parts = {
            "correct": tuple(float(verdict.correct) for verdict in verdicts),
            "strict": tuple(float(verdict.strict) for verdict in verdicts),
            "partial": tuple(verdict.score for verdict in verdicts),
        }
        return RewardBatch(parts[self.score_by], parts)

    def _check_labels(self, tasks: Sequence[Task]) -> None:
        for row, task in enumerate(tasks):
            unknown = [
                one.label for one in task.include if self.detector.labels and one.label not in self.detector.labels
            ]
            if unknown:
                known = ", ".join(sorted(self.detector.labels or ()))
                raise RewardError(self.label, f"the detector does not know '{unknown[0]}'; known: {known}", (row,))


build = GenevalReward
