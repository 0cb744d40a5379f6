"""Measures passes on a GPU: their memory, block by block, and their time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn

from digenrl.models.blocks import block_kind, block_positions, checkpoint_chosen
from digenrl.models.contract import DiffusionModel
from digenrl.training.packing.pack_size import measured_bytes

LONG_PASS_S = 2.0  # a pass that takes longer is timed only once


class PassProfiler(Protocol):
    """Runs and measures passes that leave nothing behind. Raises OutOfMemoryError if a pack does not fit."""

    @property
    def kinds(self) -> Sequence[Hashable]:
        """The kinds of the repeated blocks, in order."""

    def checkpoint(self, chosen: Collection[int]) -> None:
        """Recomputes the activations of exactly these blocks from now on."""

    def warm_up(self, pack_size: int) -> None:
        """Runs a pass, so that compilation and other one-time costs are not measured."""

    def measure(self, pack_size: int) -> tuple[int, list[int]]:
        """Peak bytes of a pass, beyond what is allocated before it, and the growth of memory in each block."""

    def seconds(self, pack_size: int) -> float:
        """The duration of a pass after warm-up."""


class CudaPassProfiler:
    """Profiles a model on a GPU; `run_pack` runs a pass of that many terms and leaves nothing behind."""

    def __init__(self, model: DiffusionModel, run_pack: Callable[[int], None]) -> None:
        self._model = model
        self._run_pack = run_pack
        self._positions = block_positions(model.transformer)
        self.kinds: Sequence[Hashable] = [block_kind(blocks[0]) for blocks in self._positions]

    def checkpoint(self, chosen: Collection[int]) -> None:
        checkpoint_chosen(self._model, [block for index in chosen for block in self._positions[index]])

    def warm_up(self, pack_size: int) -> None:
        self._run_pack(pack_size)

    def measure(self, pack_size: int) -> tuple[int, list[int]]:
        with self._recording_growth() as growth:
            return measured_bytes(partial(self._run_pack, pack_size), self._model.device), growth

    def seconds(self, pack_size: int) -> float:
        first = self._timed(pack_size)
        return first if first > LONG_PASS_S else min(first, self._timed(pack_size))

    def _timed(self, pack_size: int) -> float:
        torch.cuda.synchronize(self._model.device)
        began = perf_counter()
        self._run_pack(pack_size)
        torch.cuda.synchronize(self._model.device)
        return perf_counter() - began

    @contextmanager
    def _recording_growth(self) -> Iterator[list[int]]:
        """Yields the memory growth in the first forwards at each position; later ones are recomputations."""
        growth = [0] * len(self._positions)
        at_entry: dict[nn.Module, int] = {}
        seen: set[nn.Module] = set()

        def before(block: nn.Module, _arguments: Any) -> None:
            at_entry[block] = torch.cuda.memory_allocated(self._model.device)

        def after(index: int) -> Callable[..., None]:
            def record(block: nn.Module, _arguments: Any, _result: Any) -> None:
                if torch.is_grad_enabled() and block not in seen:
                    seen.add(block)
                    growth[index] += torch.cuda.memory_allocated(self._model.device) - at_entry[block]

            return record

        with ExitStack() as hooks:
            for index, blocks in enumerate(self._positions):
                for block in blocks:
                    hooks.enter_context(block.register_forward_pre_hook(before))
                    hooks.enter_context(block.register_forward_hook(after(index)))
            yield growth
