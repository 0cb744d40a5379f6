"""Tensors that leave a card for the machine's own memory, and come back before they are used.

A tensor that has left lies in host memory and can be read there as ever: whoever holds it holds the same tensor.
Copies are made beside the computation, in the order they are asked for. Host memory is pinned once and used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from digenrl.config.reading import ConfigError

CHUNK_BYTES = 256 * 2**20  # of host memory that is taken at once; pinned memory comes in powers of two anyway
ALIGNED_BYTES = 512

Held = Callable[[], Mapping[str, Tensor]]  # the tensors of a part that are there now, by name


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


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Host memory that holds, or is about to hold, the values of one tensor."""

    room: Tensor  # the bytes
    values: Tensor  # the same, as the tensor has them


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
        size = max(CHUNK_BYTES, 1 << (wanted - 1).bit_length())
        try:
            chunk = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        except RuntimeError as error:
            raise ConfigError(
                f"training.offload: no room for {size / 1e9:.1f} GB more of host memory beside "
                f"{self.bytes_taken / 1e9:.1f} GB that training state takes there while the card generates; give "
                "this process more memory, or set training.offload: false"
            ) from error
        self.bytes_taken += size
        return chunk


@dataclass(slots=True)
class _Part:
    """Tensors that are needed at the same time."""

    held: Held
    away: dict[str, Tensor] = field(default_factory=dict)  # those that lie in host memory
    copies: dict[str, HostCopy] = field(default_factory=dict)  # of what is away, and of what has not changed since
    under_way: Any = None  # the moment when it is back on the card
    comes: bool = False  # it was sent for, and nobody has waited for it yet


class Offload:
    """Parts of what a card holds, in the order in which they are needed when they are back.

    Values are the same to the last bit after a round trip. A part that nobody has changed since leaves the card
    without another copy: whoever changes one says so. A part that is not known here never leaves.
    """

    def __init__(self, parts: Mapping[str, Held], device: torch.device, copies: Copies | None = None) -> None:
        on_cuda = device.type == "cuda" and bool(parts)
        self._parts = {name: _Part(held) for name, held in parts.items()}
        self._device = device
        self._copies: Copies = copies or (CopiesOnStream(device) if on_cuda else CopiesAtOnce())
        self._memory = HostMemory(pin=on_cuda)

    @property
    def bytes_away(self) -> int:
        """What is not on the card."""
        return sum(tensor.nbytes for part in self._parts.values() for tensor in part.away.values())

    def leave(self) -> None:
        """Everything leaves the card; its memory is free as copies are made. What is away stays there."""
        self._copies.begin()
        for part in self._parts.values():
            held = part.held()
            self._forget(part, [name for name in part.copies if not _is_of(part, name, held)])
            for name, tensor in held.items():
                if name not in part.away:
                    self._send(part, name, tensor)
            part.comes = False

    def come_back(self) -> None:
        """Everything is sent for; who uses a part says so first, by `need`."""
        if self.bytes_away:
            self._copies.begin()
        for part in self._parts.values():
            self._send_for(part)

    def need(self, *names: str, changes: bool = False) -> None:
        """What is computed from now on finds these parts on the card, and may change them if it says so."""
        for part in self._named(names):
            if part.away:
                self._copies.begin()
                self._send_for(part)
            if part.comes:
                self._copies.wait(part.under_way)
                part.comes = False
            if changes:
                self._forget(part, list(part.copies))

    def arrived(self, *names: str) -> None:
        """Waits until these parts are back, if they were sent for."""
        for part in self._named(names):
            if part.comes:
                self._copies.finish(part.under_way)

    def settle(self) -> None:
        """Waits until nothing is under way: tensors can be read wherever they are."""
        self._copies.finish()

    def _named(self, names: tuple[str, ...]) -> list[_Part]:
        return [self._parts[name] for name in names if name in self._parts]

    def _send(self, part: _Part, name: str, tensor: Tensor) -> None:
        if name not in part.copies:
            part.copies[name] = self._memory.take(tensor)
            self._copies.copy(part.copies[name].values, tensor)
        tensor.data = part.copies[name].values
        part.away[name] = tensor

    def _send_for(self, part: _Part) -> None:
        """What nobody holds any more stays behind."""
        if not part.away:
            return
        held = part.held()
        for name, tensor in part.away.items():
            if held.get(name) is tensor:
                values = part.copies[name].values
                back = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=self._device)
                self._copies.copy(back, values)
                tensor.data = back
        part.away = {}
        part.under_way, part.comes = self._copies.mark(), True

    def _forget(self, part: _Part, names: list[str]) -> None:
        for name in names:
            part.away.pop(name, None)
            self._memory.give(part.copies.pop(name))


def _is_of(part: _Part, name: str, held: Mapping[str, Tensor]) -> bool:
    """Whether the part's copy of this name is of a tensor that is still held."""
    return name in held and part.away.get(name, held[name]) is held[name]
