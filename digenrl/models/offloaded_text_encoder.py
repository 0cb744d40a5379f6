"""Text encoders that share a card with everything else: their weights are there only while prompts are encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from digenrl.models.contract import Conditioning
from digenrl.models.pipeline_model import PipelineModel


class OffloadedTextEncoder:
    """Encodes on a device; between times the weights lie in the host's memory, pinned where the device is a card.

    They never change, so that leaving the card copies nothing.
    """

    def __init__(self, model: PipelineModel, device: torch.device | str) -> None:
        self._model = model
        self._device = torch.device(device)
        parts: list[nn.Module | None] = [getattr(model.pipeline, name) for name in model.text_encoders]
        weights = [
            weight for part in parts if part is not None for weight in (*part.parameters(), *part.buffers())
        ]
        self._at_home = [(weight, self._pinned(weight.data)) for weight in weights]
        for weight, home in self._at_home:
            weight.data = home

    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        """As the model does; the result is on the device."""
        with self._on_device():
            return self._model.encode(prompts, negative_prompts)

    def drop_text_encoders(self) -> None:
        """Frees them, at home too."""
        self._at_home = []
        self._model.drop_text_encoders()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        try:
            for weight, home in self._at_home:
                weight.data = home.to(self._device, non_blocking=True)
            yield
        finally:
            for weight, home in self._at_home:
                weight.data = home

    def _pinned(self, value: Tensor) -> Tensor:
        at_home = value.to("cpu")
        return at_home.pin_memory() if self._device.type == "cuda" else at_home
