"""The largest pack that fits: two measured packs give a line of memory over pack size.

On a GPU the peak of a forward and backward is measured. On a CPU it is what autograd saves for the backward, which
is most of it, against half of the memory that is free.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

SECOND_POINTS = (4, 2)  # pack sizes tried beside 1, the larger first


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """bytes = base + per_term * pack size, through two measured points."""

    base: float
    per_term: float

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> MemoryLine:
        """Each point is (pack size, bytes); the sizes differ. Of two that fall it is level, through the second."""
        per_term = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
        return cls(base=second[1] - per_term * second[0], per_term=per_term)

    def at(self, pack_size: int) -> float:
        """Bytes of such a pack."""
        return self.base + pack_size * self.per_term

    def largest(self, budget: int, limit: int) -> int:
        """The largest pack within the budget, at least 1 and at most `limit`."""
        if self.per_term <= 0:
            return limit
        return max(1, min(limit, int((budget - self.base) / self.per_term)))


def measure_largest_pack(
    run_pack: Callable[[int], None],
    terms: int,
    *,
    device: torch.device,
    memory_share: float,
    limit: int,
    reserved_bytes: int = 0,
) -> int:
    """Runs packs of 1 and 4 (or 2) terms, of which there are `terms`, and draws the line.

    `run_pack` does a forward and backward of so many terms and leaves no trace. Not even one fitting raises.
    `reserved_bytes` are for what several packs in a row hold and one alone does not.
    """
    if device.type == "cuda":
        run_pack(1)  # libraries take their workspaces in the first pass; they are not the pack's
    budget = int(memory_share * free_bytes(device)) - reserved_bytes
    first = (1, measured_bytes(lambda: run_pack(1), device))
    for size in SECOND_POINTS:
        if size > min(limit, terms):
            continue
        try:
            second = (size, measured_bytes(partial(run_pack, size), device))
        except torch.OutOfMemoryError:
            continue
        return MemoryLine.through(first, second).largest(budget, limit)
    return 1


def measured_bytes(run: Callable[[], None], device: torch.device) -> int:
    """What a forward and backward takes beyond what was there before."""
    if device.type != "cuda":
        with _counting_saved_bytes() as saved:
            run()
        return sum(saved.values())
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def free_bytes(device: torch.device) -> int:
    """What a pass may take: on a card also what torch holds and nobody uses, on a CPU half of what is free."""
    if device.type != "cuda":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    allocated = torch.cuda.memory_allocated(device)
    unused_by_torch = torch.cuda.memory_reserved(device) - allocated
    free, total = torch.cuda.mem_get_info(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)  # not in every version
    return min(free + unused_by_torch, int(share(device) * total) - allocated)


def allocation_retries(device: torch.device) -> int | None:
    """How often torch gave unused memory back to a card and asked anew, which takes long; None on a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


@contextmanager
def _counting_saved_bytes() -> Iterator[dict[int, int]]:
    """Inside, what autograd saves is counted: bytes by storage, each once."""
    saved: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        yield saved
