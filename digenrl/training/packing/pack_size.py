"""The largest pack that fits in memory, from two measured packs; and how memory is measured.

On a GPU, the peak of a forward and backward is measured. On a CPU it is what autograd saves for the backward,
which is most of it, compared with half of the free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from digenrl.host_memory import free_host_bytes, physical_bytes

SECOND_SIZES = (4, 2)  # one of them is measured in addition to 1, the larger one if it fits


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """bytes = base + per_term * pack size."""

    base: float
    per_term: float

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> MemoryLine:
        """The line through two points (pack size, bytes). If memory decreases, the slope is clamped to zero."""
        per_term = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
        return cls(base=second[1] - per_term * second[0], per_term=per_term)

    def at(self, pack_size: int) -> float:
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
    smallest: Callable[[int], int] = lambda size: size,
) -> int:
    """Measures packs of 1 and of 4 or 2 terms, and extrapolates. Raises OutOfMemoryError if one term does not fit.

    `run_pack` does a forward and backward of that many of the `terms` terms and leaves nothing behind.
    `reserved_bytes` are needed in addition to a single pack. The second pack is one that fits even if all memory
    of the first is needed per term. `smallest` makes ranks that run packs together agree on it.
    """
    if device.type == "cuda":
        run_pack(1)  # the first pass allocates workspaces of libraries, which are not the pack's
    budget = int(memory_share * free_bytes(device)) - reserved_bytes
    first = (1, measured_bytes(lambda: run_pack(1), device))
    fitting = smallest(MemoryLine(0, first[1]).largest(budget, min(limit, terms)))
    for size in SECOND_SIZES:
        if size > fitting:
            continue
        try:
            second = (size, measured_bytes(partial(run_pack, size), device))
        except torch.OutOfMemoryError:
            continue
        return MemoryLine.through(first, second).largest(budget, limit)
    return 1


def measured_bytes(run: Callable[[], None], device: torch.device) -> int:
    """The memory that a forward and backward needs in addition to what is allocated before it."""
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
    """The memory available to a pass: on a GPU with torch's unused cache, on a CPU half of what is free.

    Where the system does not say what is free, it is half of all memory.
    """
    if device.type != "cuda":
        free = free_host_bytes()
        return (physical_bytes() if free is None else free) // 2
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    free, _ = torch.cuda.mem_get_info(device)
    return min(free + cached, usable_bytes(device) - allocated)


def usable_bytes(device: torch.device) -> int:
    """All memory of a GPU that this process may use, or all of the machine's."""
    if device.type != "cuda":
        return physical_bytes()
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)  # in newer versions
    return int(fraction(device) * torch.cuda.mem_get_info(device)[1])


def allocation_retries(device: torch.device) -> int | None:
    """How often torch has returned its cache to the GPU and allocated again, which is slow; None on a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


class RetryCounter:
    """Counts the allocator's retries between calls."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0

    def since_last(self) -> int | None:
        """The retries since the last call; None on a CPU."""
        before, now = self._before, allocation_retries(self._device)
        self._before = now or 0
        return None if now is None else now - before


@contextmanager
def _counting_saved_bytes() -> Iterator[dict[int, int]]:
    """Yields the bytes that autograd saves inside, by storage."""
    saved: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        yield saved
