"""Copies between a card and the machine's own memory, made beside the computation, in the order of asking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.host_memory import free_host_bytes

CHUNK_BYTES = 256 * 2**20  # of host memory that is taken at once; pinned memory comes in powers of two anyway
ALIGNED_BYTES = 512
SPARED_BYTES = 2 * 2**30  # for everybody else

Copied = Callable[[Tensor], Tensor]  # makes a copy in host memory, perhaps later


def cpu_copy(value: Tensor) -> Tensor:
    """At once, and nothing else holds it."""
    return value.detach().to("cpu", copy=True)


def copies_of(tensors: Mapping[str, Tensor], copied: Copied) -> dict[str, Tensor]:
    """By the same names."""
    return {name: copied(value) for name, value in tensors.items()}


class Copies(Protocol):
    """Makes copies one after the other, beside what is computed meanwhile."""

    def begin(self) -> None:
        """Copies from here on see what was computed before."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Asks for a copy. The memory of both stays until it is made, whoever lets go of them."""

    def mark(self) -> Any:
        """The moment when all copies are made that were asked for."""

    def wait(self, mark: Any) -> None:
        """What is computed from now on finds the copies made."""

    def finish(self, mark: Any = None) -> None:
        """Waits until the copies before the mark are made, or all."""


class CopiesAtOnce:
    """On a CPU: every copy is made when it is asked for."""

    def begin(self) -> None:
        """Nothing is under way."""

    @torch.no_grad()
    def copy(self, target: Tensor, source: Tensor) -> None:
        """At once."""
        target.copy_(source)

    def mark(self) -> None:
        """Now."""

    def wait(self, mark: None) -> None:
        """Nothing to wait for."""

    def finish(self, mark: None = None) -> None:
        """Nothing to wait for."""


class CopiesOnStream:
    """On a CUDA card: a stream of their own, which the card's copy engines serve while it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """The stream waits for what the computation was told so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @torch.no_grad()
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Returns before it is made: the allocator is told, so that it gives no memory away too soon."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """An event of the stream."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """The computation waits; this thread goes on."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: torch.cuda.Event | None = None) -> None:
        """This thread waits."""
        if mark is None:
            self._stream.synchronize()
        else:
            mark.synchronize()


def copies_beside(device: torch.device) -> Copies:
    """Beside what this device computes, where it can."""
    return CopiesOnStream(device) if device.type == "cuda" else CopiesAtOnce()


@dataclass(slots=True, eq=False)
class HostCopy:
    """Host memory that holds, or is about to hold, the values of one tensor."""

    room: Tensor  # the bytes
    values: Tensor  # the same, as the tensor has them
    of: ReferenceType[Tensor] | None = None
    holders: int = 0


class HostMemory:
    """Host memory in large chunks, taken when they are first needed and kept; pinned for a CUDA card."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._left: list[Tensor] = []  # of chunks
        self._free: dict[int, list[Tensor]] = {}  # given back, by size
        self.bytes_taken = 0

    def take(self, like: Tensor) -> HostCopy:
        """Room for a tensor's values, with its shape and the order of its elements."""
        stride = torch.empty_like(like, device="meta").stride()
        wanted = -(-max(1, like.numel() * like.element_size()) // ALIGNED_BYTES) * ALIGNED_BYTES
        free = self._free.get(wanted)
        room = free.pop() if free else self._cut(wanted)
        return HostCopy(room, room.view(like.dtype).as_strided(like.shape, stride))

    def give(self, copy: HostCopy) -> None:
        """The room may be used for something else."""
        self._free.setdefault(copy.room.nbytes, []).append(copy.room)

    def _cut(self, wanted: int) -> Tensor:
        """Of the first chunk that has as much left, or of a new one."""
        fitting = (index for index, left in enumerate(self._left) if left.nbytes >= wanted)
        index = next(fitting, None)
        chunk = self._chunk(wanted) if index is None else self._left.pop(index)
        if chunk.nbytes > wanted:
            self._left.append(chunk[wanted:])
        return chunk[:wanted]

    def _chunk(self, wanted: int) -> Tensor:
        size, left = max(CHUNK_BYTES, 1 << (wanted - 1).bit_length()), free_host_bytes()
        if self._pin and left is not None and left < size + SPARED_BYTES:  # asked for it, the system would kill
            raise ConfigError(self._no_room_for(size, f", and {left / 1e9:.1f} GB are left"))
        try:
            chunk = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        except RuntimeError as error:
            raise ConfigError(self._no_room_for(size)) from error
        self.bytes_taken += size
        return chunk

    def _no_room_for(self, size: int, left: str = "") -> str:
        return (
            f"no room for {size / 1e9:.1f} GB more of host memory: a trainer's state takes "
            f"{self.bytes_taken / 1e9:.1f} GB there already{left}; give this machine more, or set "
            "checkpoint.in_memory: false, training.offload: false or updates_per_batch: 1"
        )


class HostCopies:
    """Copies in host memory of what a card holds: one for all holders while nobody has changed the tensor."""

    def __init__(self, device: torch.device, copies: Copies | None = None) -> None:
        self.copies = copies or copies_beside(device)
        self.memory = HostMemory(pin=device.type == "cuda")
        self._unchanged: dict[int, HostCopy] = {}  # by the identity of tensors

    def hold(self, tensor: Tensor) -> HostCopy:
        """A copy, perhaps under way, until its holder lets go of it."""
        copy = self._unchanged.get(id(tensor))
        if copy is None or copy.of is None or copy.of() is not tensor:
            copy = self.memory.take(tensor)
            copy.of = ref(tensor)
            self.copies.copy(copy.values, tensor.detach())
            self._unchanged[id(tensor)] = copy
        copy.holders += 1
        return copy

    def let_go(self, copy: HostCopy) -> None:
        """The last one to let go frees its memory for other copies."""
        copy.holders -= 1
        if not copy.holders:
            copy.of = None
            self.memory.give(copy)

    def changed(self, tensors: Iterable[Tensor]) -> None:
        """What is held of these is of before."""
        for tensor in tensors:
            self._unchanged.pop(id(tensor), None)

    def reserve(self, likes: Iterable[Tensor]) -> None:
        """Takes the memory for copies of all these, so that nobody waits for it later."""
        for copy in [self.memory.take(like) for like in likes]:
            self.memory.give(copy)
