"""Weights in host memory that are on a device only while they are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from PIL import Image
from torch import Tensor, nn

from digenrl.config.reading import ConfigError
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.models.pipeline_model import PipelineModel


class ParkedWeights:
    """The weights of some modules. While they are on the device they must not change: they are not copied back."""

    def __init__(self, modules: Sequence[nn.Module | None], device: torch.device | str, *, pinned: bool) -> None:
        self._device, self._pins = torch.device(device), pinned and torch.device(device).type == "cuda"
        parts = [module for module in modules if module is not None]
        weights = [weight for part in parts for weight in (*part.parameters(), *part.buffers())]
        self._host_copies: list[tuple[Tensor, Tensor]] = []
        for weight in weights:  # parked one by one: what is pinned is a copy, and the original is freed
            weight.data = self._on_host(weight.data)
            self._host_copies.append((weight, weight.data))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        try:
            for weight, host in self._host_copies:
                weight.data = host.to(self._device, non_blocking=True)
            yield
        finally:
            for weight, host in self._host_copies:
                weight.data = host

    def _on_host(self, value: Tensor) -> Tensor:
        host = value.to("cpu")
        return host.pin_memory() if self._pins else host


class OffloadedTextEncoder:
    """Encodes on a device; between calls the weights are in host memory, pinned if the device is a GPU.

    For a worker that also generates or trains there. `encode` returns tensors on the device.
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


class ParkedModel:
    """A second model, for evaluations: with other frozen weights, and the adapters of a worker's own model."""

    def __init__(self, model: PipelineModel, device: torch.device | str) -> None:
        self._model = model
        self._weights = ParkedWeights([model.transformer, model.vae], device, pinned=False)

    @contextmanager
    def with_weights_of(self, other: DiffusionModel) -> Iterator[DiffusionModel]:
        """Inside, the model is on the device and has the trained weights of the other one.

        Raises ConfigError if there is no room for it.
        """
        load_weights(self._model, weights_state(other, "cpu"))
        other.release_rollout_memory()
        try:
            with self._weights.on_device():
                yield self._model
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "evaluation.base: unquantized, but the device has no room for the unquantized weights besides "
                "those that train and generate; leave it out"
            ) from error
        finally:
            self._model.release_rollout_memory()  # captured forwards refer to weights on the device
