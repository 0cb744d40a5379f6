"""Forwards of rollouts as CUDA graphs, so that the GPU does not wait for the host to launch kernels.

The first forward of a shape runs eagerly, the second is captured, and all others are replayed; results are bitwise
the same. Forwards that cannot be captured, mainly for lack of memory, keep running eagerly.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize
from digenrl.models.quantized.layers import weight_count

MAX_SHAPES = 16  # kept at a time; prompts of different lengths have different shapes
MAX_OPERATIONS = 1e14  # 2 x parameters x latent tokens: longer forwards are not limited by kernel launches


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    velocity_BL: Tensor

    def replay(self, inputs: list[Tensor]) -> Tensor:
        """A copy of the result: the next replay overwrites the graph's output."""
        for static, given in zip(self.inputs, inputs, strict=True):
            static.copy_(given)
        self.graph.replay()
        return self.velocity_BL.clone()


class _NotCaptured(Enum):
    """Why a shape has no graph."""

    RAN_ONCE = auto()
    FAILED = auto()


class GraphedForwards:
    """Replaces a model's `velocity` for forwards without gradient."""

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model
        modules = list(model.transformer.modules())
        self._parameters = weight_count(model.transformer)
        self._adapters = next((each for each in modules if isinstance(each, BaseTunerLayer)), None)
        self._pool: Any = None  # torch does not export its type
        self._graphs: OrderedDict[Hashable, _Graph | _NotCaptured] = OrderedDict()

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        if not self._worth_capturing(latents_BL, size):
            return self._model.velocity(latents_BL, timesteps_B, conditioning, guidance, size)
        inputs = [latents_BL, timesteps_B, *conditioning.tensors()]
        key = (*self._key(), guidance, size, *((value.shape, value.dtype) for value in inputs))
        found = self._graphs.get(key)
        if found is _NotCaptured.RAN_ONCE:
            found = self._try_capture(inputs, conditioning, guidance, size)
        self._remember(key, found or _NotCaptured.RAN_ONCE)
        if isinstance(found, _Graph):
            return found.replay(inputs)
        return self._model.velocity(latents_BL, timesteps_B, conditioning, guidance, size)

    def _worth_capturing(self, latents_BL: Tensor, size: SampleSize) -> bool:
        tokens = latents_BL.shape[0] * size.height * size.width * (1 + (size.frames - 1) // 4) // 256
        short = 2 * self._parameters * tokens <= MAX_OPERATIONS
        return short and latents_BL.device.type == "cuda" and not torch.is_grad_enabled()

    def _key(self) -> tuple[Hashable, ...]:
        """What a graph depends on besides shapes: addresses of trained weights, adapters on or off, autocast."""
        layer: nn.Module = self._model.transformer if self._adapters is None else self._adapters
        trained = itertools.islice((p for p in layer.parameters() if p.requires_grad), 1)
        adapters_on = self._adapters is not None and not self._adapters.disable_adapters
        return *(weight.data_ptr() for weight in trained), adapters_on, torch.is_autocast_enabled("cuda")

    def _try_capture(
        self, inputs: list[Tensor], conditioning: Conditioning, guidance: float, size: SampleSize
    ) -> _Graph | _NotCaptured:
        # A forward that is wrong in itself fails again when it runs eagerly, and raises then.
        try:
            return self._capture(inputs, conditioning, guidance, size)
        except RuntimeError:  # torch.OutOfMemoryError is one
            return _NotCaptured.FAILED

    def _capture(
        self, inputs: list[Tensor], conditioning: Conditioning, guidance: float, size: SampleSize
    ) -> _Graph:
        static = [value.clone() for value in inputs]
        rest = iter(static[2:])
        held = conditioning.mapped(lambda _: next(rest))
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # graphs never run concurrently: they share memory
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            velocity_BL = self._model.velocity(static[0], static[1], held, guidance, size)
        return _Graph(graph, static, velocity_BL)

    def _remember(self, key: Hashable, graph: _Graph | _NotCaptured) -> None:
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        while len(self._graphs) > MAX_SHAPES:
            self._graphs.popitem(last=False)
