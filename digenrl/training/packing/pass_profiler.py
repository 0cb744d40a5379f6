"""Measures passes on a card: the memory that they take, block by block, and their time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn

from digenrl.models.blocks import block_kind, checkpoint_chosen, repeated_blocks
from digenrl.models.contract import DiffusionModel

LONG_S = 2.0  # a pass that takes longer is not repeated


class CardGauge:
    """A `Gauge` of a model on a CUDA device; `run_pack` does a pass of so many terms and leaves no trace."""

    def __init__(self, model: DiffusionModel, run_pack: Callable[[int], None]) -> None:
        self._model = model
        self._run_pack = run_pack
        self._blocks = repeated_blocks(model.transformer)
        self.kinds: Sequence[Hashable] = [block_kind(block) for block in self._blocks]

    def checkpoint(self, chosen: Collection[int]) -> None:
        """From now on these blocks are computed again."""
        checkpoint_chosen(self._model, [self._blocks[index] for index in chosen])

    def warm_up(self, pack_size: int) -> None:
        """Compiles, and lets libraries take their workspaces, which are not the pack's."""
        self._run_pack(pack_size)

    def measure(self, pack_size: int) -> tuple[int, list[int]]:
        """Peak bytes of a pass, beyond what was there before, and by how much memory grew in each block."""
        device = self._model.device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with self._watching_blocks() as grown:
            self._run_pack(pack_size)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, grown

    def seconds(self, pack_size: int) -> float:
        """Of one pass, until the card is done; of a short one, the shorter of two."""
        first = self._timed(pack_size)
        return first if first > LONG_S else min(first, self._timed(pack_size))

    def _timed(self, pack_size: int) -> float:
        torch.cuda.synchronize(self._model.device)
        began = perf_counter()
        self._run_pack(pack_size)
        torch.cuda.synchronize(self._model.device)
        return perf_counter() - began

    @contextmanager
    def _watching_blocks(self) -> Iterator[list[int]]:
        """Fills a list with the growth of each block's first forward: later ones are from within the backward."""
        grown, at_entry = [0] * len(self._blocks), [-1] * len(self._blocks)
        seen: set[int] = set()

        def entered(index: int) -> Callable[..., None]:
            def remember(_module: nn.Module, _arguments: Any) -> None:
                at_entry[index] = torch.cuda.memory_allocated(self._model.device)

            return remember

        def left(index: int) -> Callable[..., None]:
            def count(_module: nn.Module, _arguments: Any, _result: Any) -> None:
                if torch.is_grad_enabled() and index not in seen:
                    seen.add(index)
                    grown[index] = torch.cuda.memory_allocated(self._model.device) - at_entry[index]

            return count

        hooks = [
            hook
            for index, block in enumerate(self._blocks)
            for hook in (block.register_forward_pre_hook(entered(index)), block.register_forward_hook(left(index)))
        ]
        try:
            yield grown
        finally:
            for hook in hooks:
                hook.remove()
