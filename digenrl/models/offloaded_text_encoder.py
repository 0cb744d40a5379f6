"""Text encoders that share a GPU with the rest of the worker: on the GPU only while prompts are encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from digenrl.models.contract import Conditioning
from digenrl.models.pipeline_model import PipelineModel


class OffloadedTextEncoder:
    """Encodes on a device; between calls the weights are in host memory, pinned if the device is a GPU.

    The weights never change, so they are not copied back from the GPU. `encode` returns tensors on the device.
    """

    def __init__(self, model: PipelineModel, device: torch.device | str) -> None:
        self._model = model
        self._device = torch.device(device)
        parts: list[nn.Module | None] = [getattr(model.pipeline, name) for name in model.text_encoders]
        weights = [
            weight for part in parts if part is not None for weight in (*part.parameters(), *part.buffers())
        ]
        self._host_copies = [(weight, self._pinned(weight.data)) for weight in weights]
        for weight, host in self._host_copies:
            weight.data = host

    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        with self._on_device():
            return self._model.encode(prompts, negative_prompts)

    def drop_text_encoders(self) -> None:
        self._host_copies = []
        self._model.drop_text_encoders()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        try:
            for weight, host in self._host_copies:
                weight.data = host.to(self._device, non_blocking=True)
            yield
        finally:
            for weight, host in self._host_copies:
                weight.data = host

    def _pinned(self, value: Tensor) -> Tensor:
        host = value.to("cpu")
        return host.pin_memory() if self._device.type == "cuda" else host
