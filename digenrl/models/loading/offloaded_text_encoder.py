"""Text encoders that share a GPU with the rest of the worker: on the GPU only while prompts are encoded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from PIL import Image

from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.loading.parked import ParkedWeights
from digenrl.models.pipeline_model import PipelineModel


class OffloadedTextEncoder:
    """Encodes on a device; between calls the weights are in host memory, pinned if the device is a GPU.

    `encode` returns tensors on the device.
    """

    def __init__(self, model: PipelineModel, device: torch.device | str) -> None:
        self._model = model
        encoders = [*model.encoding_modules(), *([] if model.vae is None else [model.vae])]
        self._weights: ParkedWeights | None = ParkedWeights(encoders, device, pinned=True)

    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        with self._on_device():
            return self._model.encode(prompts, negative_prompts)

    def encode_with_images(
        self,
        prompts: Sequence[str],
        images: Sequence[Sequence[Image.Image]],
        size: SampleSize,
        negative_prompts: Sequence[str] | None = None,
    ) -> Conditioning:
        with self._on_device():
            return self._model.encode_with_images(prompts, images, size, negative_prompts)

    def drop_text_encoders(self) -> None:
        self._weights = None
        self._model.drop_text_encoders()

    def _on_device(self) -> AbstractContextManager[object]:
        return nullcontext() if self._weights is None else self._weights.on_device()
