"""Tensors that leave a card for the machine's own memory, and come back before they are used.

A tensor that has left lies in host memory and can be read there as ever: whoever holds it holds the same tensor.
Host memory is pinned once and used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from digenrl.training.offload.host_copies import HostCopies, HostCopy

Held = Callable[[], Mapping[str, Tensor]]  # the tensors of a part that are there now, by name


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

    def __init__(self, parts: Mapping[str, Held], device: torch.device, host: HostCopies | None = None) -> None:
        self._parts = {name: _Part(held) for name, held in parts.items()}
        self._device = device
        self._host = host or HostCopies(device)
        self._copies = self._host.copies

    @property
    def bytes_away(self) -> int:
        """What is not on the card."""
        return sum(tensor.nbytes for part in self._parts.values() for tensor in part.away.values())

    @property
    def host_bytes(self) -> int:
        """Host memory that was taken so far, also by who shares it."""
        return self._host.memory.bytes_taken

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
                self._host.changed(part.held().values())
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
            part.copies[name] = self._host.hold(tensor)
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
            self._host.let_go(part.copies.pop(name))


def _is_of(part: _Part, name: str, held: Mapping[str, Tensor]) -> bool:
    """Whether the part's copy of this name is of a tensor that is still held."""
    return name in held and part.away.get(name, held[name]) is held[name]
