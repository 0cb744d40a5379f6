"""CLIP, the backbone of several rewards: loading, and the cosine similarity of images and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, CLIPModel

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.models import ClipRewardSettings
from digenrl.rewards.contract import FrameReward, Metadata, RewardBatch, as_pil
from digenrl.rewards.parts.weights import is_directory, load_pretrained, load_whole_model, pick_device


class ClipImages:
    def __init__(self, processor: str) -> None:
        self._processor = load_pretrained(AutoImageProcessor.from_pretrained, processor, backend="pil")

    def __call__(self, frames_NCHW: Tensor) -> Tensor:
        """The model's pixel values: frames resized, cropped and normalized by the processor."""
        return self.of_images(list(as_pil(frames_NCHW)))

    def of_images(self, images: Sequence[Image.Image]) -> Tensor:
        """The same for images of any sizes."""
        pixel_values: Tensor = self._processor(images=list(images), return_tensors="pt")["pixel_values"]
        return pixel_values


class LetterboxedImages(ClipImages):
    """Scales images to fit the model's square and fills the rest with black, instead of cropping them."""

    def of_images(self, images: Sequence[Image.Image]) -> Tensor:
        side = self._processor.crop_size["height"]
        square_NCHW = torch.stack([letterboxed(image, side) for image in images])
        colors = (self._processor.image_mean, self._processor.image_std)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in colors)
        return (square_NCHW - mean) / std


def letterboxed(image: Image.Image, side: int) -> Tensor:
    """The whole image in the middle of a black square, (3, side, side), as HPSv2's `ResizeMaxSize` places it.

    It resizes real numbers: at edges, values are a little below 0 and above 1.
    """
    pixels_1CHW = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)[None].float() / 255
    scale = side / max(image.size)
    width, height = (round(length * scale) for length in image.size)
    left, top = (side - width) // 2, (side - height) // 2
    whole_1CHW = interpolate(pixels_1CHW, (height, width), mode="bicubic", align_corners=False, antialias=True)
    return pad(whole_1CHW, (left, side - width - left, top, side - height - top))[0]


class ClipPairReward(FrameReward):
    """The cosine similarity of each image with its prompt, times `scale`. Rows are independent."""

    preprocessing: type[ClipImages] = ClipImages

    def __init__(self, settings: ClipRewardSettings, model: Any, processor: str, scale: float = 1.0) -> None:
        super().__init__(settings.shown_as, settings.frame_stride)
        self.scale = scale
        self.batch_size = settings.batch_size
        self.device = pick_device(settings.device)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self._images = self.preprocessing(processor)
        self._tokenizer = load_pretrained(AutoTokenizer.from_pretrained, processor)

    @torch.inference_mode()
    def score_frames(
        self, frames_NCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> RewardBatch:
        cosines: list[float] = []
        for start in range(0, len(prompts), self.batch_size):
            rows = slice(start, start + self.batch_size)
            cosines += self._cosines(frames_NCHW[rows], prompts[rows])
        return RewardBatch(tuple(self.scale * cosine for cosine in cosines), {"cosine": tuple(cosines)})

    def _cosines(self, frames_NCHW: Tensor, prompts: Sequence[str]) -> list[float]:
        tokens = self._tokenizer(
            list(prompts),
            padding="max_length",
            truncation=True,
            max_length=self.model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self.device)
        outputs = self.model(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            pixel_values=self._images(frames_NCHW).to(self.device, self.model.dtype),
        )
        cosine_N = (outputs.image_embeds.float() * outputs.text_embeds.float()).sum(dim=-1)
        cosines: list[float] = cosine_N.tolist()
        return cosines


def load_clip(settings: ClipRewardSettings) -> Any:
    """The whole model; raises ConfigError, from its config alone, if it is of another architecture."""
    config = load_pretrained(AutoConfig.from_pretrained, settings.model)
    if config.model_type != "clip":
        raise ConfigError(f"{settings.model}: expected the weights of a CLIP model, got '{config.model_type}'")
    return load_whole_model(CLIPModel.from_pretrained, settings.model, dtype=getattr(torch, settings.dtype))


def processor_of(settings: ClipRewardSettings, published: str | None = None) -> str:
    """Where tokenizer and image processor are: as configured, with the model, or as published."""
    if settings.processor is not None:
        return settings.processor
    return settings.model if published is None or is_directory(settings.model) else published
