"""Weights in host memory that are on a device only while they are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from digenrl.config.reading import ConfigError
from digenrl.models.contract import DiffusionModel
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
