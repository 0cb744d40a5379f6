"""Forwards of rollouts as CUDA graphs: the host hands a whole forward to the card at once.

A small batch of a large model is over on the card before the host has launched all its kernels. A shape's first
forward runs as it is, the second is recorded, and all others are replayed. Results are the same to the last bit.
What cannot be recorded, for want of memory above all, goes on running as it is.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize

RECORDINGS = 16  # shapes that are remembered; prompts of different lengths have different ones
OPERATIONS = 1e14  # 2 x parameters x tokens of latents: in longer forwards the host is not what the card waits for


@dataclass(frozen=True, slots=True)
class _Recording:
    """A graph, the tensors that it reads, and the one that it leaves its result in."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    velocity_BL: Tensor

    def replay(self, inputs: list[Tensor]) -> Tensor:
        """The result in memory of its own: the next replay overwrites the graph's."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.velocity_BL.clone()


class _Unrecorded(Enum):
    """Why there is no recording of a shape."""

    RAN_ONCE = auto()
    CANNOT_BE = auto()


class CapturedForwards:
    """Stands in for a model's `velocity` wherever there is no gradient."""

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model
        modules = list(model.transformer.modules())
        self._parameters = sum(weight.numel() for weight in model.transformer.parameters())
        self._adapters = next((each for each in modules if isinstance(each, BaseTunerLayer)), None)
        self._pool: Any = None  # torch names its type nowhere
        self._recordings: OrderedDict[Hashable, _Recording | _Unrecorded] = OrderedDict()

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """As the model's own."""
        if not self._worth_recording(latents_BL, size):
            return self._model.velocity(latents_BL, timesteps_B, conditioning, guidance, size)
        inputs = [latents_BL, timesteps_B, *_tensors(conditioning)]
        key = (*self._key(), guidance, size, *((value.shape, value.dtype) for value in inputs))
        found = self._recordings.get(key)
        if found is _Unrecorded.RAN_ONCE:
            found = self._recorded_if_possible(inputs, conditioning, guidance, size)
        self._remember(key, found or _Unrecorded.RAN_ONCE)
        if isinstance(found, _Recording):
            return found.replay(inputs)
        return self._model.velocity(latents_BL, timesteps_B, conditioning, guidance, size)

    def _worth_recording(self, latents_BL: Tensor, size: SampleSize) -> bool:
        tokens = latents_BL.shape[0] * size.height * size.width * (1 + (size.frames - 1) // 4) // 256
        short = 2 * self._parameters * tokens <= OPERATIONS
        return short and latents_BL.device.type == "cuda" and not torch.is_grad_enabled()

    def _key(self) -> tuple[Hashable, ...]:
        """What a graph holds fast besides shapes: where trained weights lie, whether adapters are on, types."""
        layer: nn.Module = self._model.transformer if self._adapters is None else self._adapters
        trained = itertools.islice((p for p in layer.parameters() if p.requires_grad), 1)
        adapters_on = self._adapters is not None and not self._adapters.disable_adapters
        return *(weight.data_ptr() for weight in trained), adapters_on, torch.is_autocast_enabled("cuda")

    def _recorded_if_possible(
        self, inputs: list[Tensor], conditioning: Conditioning, guidance: float, size: SampleSize
    ) -> _Recording | _Unrecorded:
        """A forward that is wrong in itself fails again when it runs as it is, and is told then."""
        try:
            return self._record(inputs, conditioning, guidance, size)
        except RuntimeError:  # torch's own for a lack of memory is one
            return _Unrecorded.CANNOT_BE

    def _record(
        self, inputs: list[Tensor], conditioning: Conditioning, guidance: float, size: SampleSize
    ) -> _Recording:
        own = [value.clone() for value in inputs]
        held = _with_tensors(conditioning, own[2:])
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # graphs run one after the other: all use the same memory
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            velocity_BL = self._model.velocity(own[0], own[1], held, guidance, size)
        return _Recording(graph, own, velocity_BL)

    def _remember(self, key: Hashable, recording: _Recording | _Unrecorded) -> None:
        self._recordings[key] = recording
        self._recordings.move_to_end(key)
        while len(self._recordings) > RECORDINGS:
            self._recordings.popitem(last=False)


def _tensors(conditioning: Conditioning) -> list[Tensor]:
    sides = [conditioning.positive, conditioning.negative or {}]
    return [value for side in sides for value in side.values() if value is not None]


def _with_tensors(conditioning: Conditioning, tensors: list[Tensor]) -> Conditioning:
    """The same text arguments with other tensors, in the order of `_tensors`."""
    rest = iter(tensors)

    def filled(side: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        return {name: None if value is None else next(rest) for name, value in side.items()}

    return Conditioning(
        filled(conditioning.positive), None if conditioning.negative is None else filled(conditioning.negative)
    )
