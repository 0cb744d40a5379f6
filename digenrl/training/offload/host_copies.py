"""Copies of device tensors in host memory, made asynchronously and shared by everyone who needs the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.host_memory import free_host_bytes

CHUNK_BYTES = 256 * 2**20  # allocated at once; torch rounds pinned memory up to a power of two anyway
ALIGNMENT_BYTES = 512
RESERVE_BYTES = 2 * 2**30  # left free for everything else on the machine

CopyTensor = Callable[[Tensor], Tensor]
"""Returns a copy in host memory; its values may arrive later."""


def cpu_copy(value: Tensor) -> Tensor:
    """A copy in freshly allocated host memory, complete on return."""
    return value.detach().to("cpu", copy=True)


def on_host(value: Tensor) -> Tensor:
    """The tensor itself if it is on the host, else a copy."""
    return value.detach().cpu()


def copy_all(tensors: Mapping[str, Tensor], copy: CopyTensor) -> dict[str, Tensor]:
    return {name: copy(value) for name, value in tensors.items()}


class Copier:
    """Makes copies in the order in which they are requested: on a CPU, at the time of the request."""

    def begin(self) -> None:
        """Makes later copies wait for everything computed so far."""

    @torch.no_grad()
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Requests a copy. The memory of both tensors stays allocated until it is made."""
        target.copy_(source)

    def mark(self) -> Any:
        """A marker that is reached once all copies requested so far are made."""

    def wait(self, mark: Any) -> None:
        """Makes later computation wait for the marker, without blocking this thread."""

    def finish(self, mark: Any = None) -> None:
        """Blocks this thread until the marker is reached, or until all copies are made."""


class StreamCopier(Copier):
    """Makes copies on a separate CUDA stream, which the GPU's copy engines serve during computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @torch.no_grad()
    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: torch.cuda.Event | None = None) -> None:
        if mark is None:
            self._stream.synchronize()
        else:
            mark.synchronize()


def make_copier(device: torch.device) -> Copier:
    return StreamCopier(device) if device.type == "cuda" else Copier()


@dataclass(slots=True, eq=False)
class HostCopy:
    """A copy of one tensor in host memory; it may still be under way."""

    memory: Tensor  # raw bytes
    values: Tensor  # the same memory, with the tensor's dtype, shape and strides
    source: ReferenceType[Tensor] | None = None
    holders: int = 0


class HostMemory:
    """Allocates host memory in large chunks that are kept and reused; pinned for a GPU."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._unused: list[Tensor] = []  # the remainders of chunks
        self._free: dict[int, list[Tensor]] = {}  # returned blocks, by size
        self.allocated_bytes = 0

    def take(self, like: Tensor) -> HostCopy:
        stride = torch.empty_like(like, device="meta").stride()
        size = -(-max(1, like.numel() * like.element_size()) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        free = self._free.get(size)
        memory = free.pop() if free else self._cut(size)
        return HostCopy(memory, memory.view(like.dtype).as_strided(like.shape, stride))

    def give_back(self, copy: HostCopy) -> None:
        """Makes the memory available for other copies."""
        self._free.setdefault(copy.memory.nbytes, []).append(copy.memory)

    def _cut(self, size: int) -> Tensor:
        fitting = (index for index, chunk in enumerate(self._unused) if chunk.nbytes >= size)
        index = next(fitting, None)
        chunk = self._allocate(size) if index is None else self._unused.pop(index)
        if chunk.nbytes > size:
            self._unused.append(chunk[size:])
        return chunk[:size]

    def _allocate(self, at_least: int) -> Tensor:
        size, free = max(CHUNK_BYTES, 1 << (at_least - 1).bit_length()), free_host_bytes()
        # Pinned memory cannot be swapped out: beyond this limit the kernel would kill the process.
        if self._pin and free is not None and free < size + RESERVE_BYTES:
            raise ConfigError(self._out_of_memory(size, f", and {free / 1e9:.1f} GB are free"))
        try:
            chunk = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        except RuntimeError as error:
            raise ConfigError(self._out_of_memory(size)) from error
        self.allocated_bytes += size
        return chunk

    def _out_of_memory(self, size: int, free: str = "") -> str:
        return (
            f"cannot allocate {size / 1e9:.1f} GB of host memory: the trainer's state already uses "
            f"{self.allocated_bytes / 1e9:.1f} GB{free}; use a machine with more memory, or set "
            "checkpoint.in_memory: false, training.offload: false or updates_per_batch: 1"
        )


class HostCopies:
    """Reference-counted host copies. Until a tensor changes, all holders share one copy of it."""

    def __init__(self, device: torch.device, copier: Copier | None = None) -> None:
        self.copier = copier or make_copier(device)
        self.memory = HostMemory(pin=device.type == "cuda")
        self._current: dict[int, HostCopy] = {}  # up-to-date copies, by the id of the tensor

    def acquire(self, tensor: Tensor) -> HostCopy:
        """A copy of the tensor, possibly still under way; must be released."""
        copy = self._current.get(id(tensor))
        if copy is None or copy.source is None or copy.source() is not tensor:
            copy = self.memory.take(tensor)
            copy.source = ref(tensor)
            self.copier.copy(copy.values, tensor.detach())
            self._current[id(tensor)] = copy
        copy.holders += 1
        return copy

    def release(self, copy: HostCopy) -> None:
        """Ends one hold; after the last one the memory is reused."""
        copy.holders -= 1
        if not copy.holders:
            copy.source = None
            self.memory.give_back(copy)

    def mark_changed(self, tensors: Iterable[Tensor]) -> None:
        """Existing copies of these tensors are outdated from now on; they stay valid for their holders."""
        for tensor in tensors:
            self._current.pop(id(tensor), None)

    def reserve(self, likes: Iterable[Tensor]) -> None:
        """Allocates memory for copies of all these tensors in advance."""
        for copy in [self.memory.take(like) for like in likes]:
            self.memory.give_back(copy)
