"""Moves tensors from a device to host memory and back, asynchronously.

An offloaded tensor object keeps its identity: its data is in host memory and can be read there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from digenrl.training.offload.host_copies import HostCopies, HostCopy

CurrentTensors = Callable[[], Mapping[str, Tensor]]
"""The tensors that currently belong to a part, by name."""


@dataclass(slots=True)
class _Part:
    """Tensors that are needed at the same time."""

    current: CurrentTensors
    offloaded: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[str, HostCopy] = field(default_factory=dict)  # of offloaded and of unchanged tensors
    loaded: Any = None  # the copier's marker for the end of the transfer back
    loading: bool = False  # requested, and not waited for yet


class Offloader:
    """Offloads named parts of a device's memory; they are loaded again in the order given here.

    A round trip preserves every bit. A part that has not changed is not copied again: `require` must announce
    changes. Names that are not among the parts are ignored.
    """

    def __init__(
        self, parts: Mapping[str, CurrentTensors], device: torch.device, host: HostCopies | None = None
    ) -> None:
        self._parts = {name: _Part(current) for name, current in parts.items()}
        self._device = device
        self._host = host or HostCopies(device)
        self._copier = self._host.copier

    @property
    def offloaded_bytes(self) -> int:
        """The size of everything that is currently offloaded."""
        return sum(tensor.nbytes for part in self._parts.values() for tensor in part.offloaded.values())

    @property
    def host_bytes(self) -> int:
        """Host memory allocated so far, including that of others who share the host copies."""
        return self._host.memory.allocated_bytes

    def offload(self) -> None:
        """Starts to offload everything; device memory is freed as copies complete."""
        if self._parts:
            self._copier.begin()
        for part in self._parts.values():
            current = part.current()
            self._drop_copies(part, [name for name in part.copies if not _is_current(part, name, current)])
            for name, tensor in current.items():
                if name not in part.offloaded:
                    self._send(part, name, tensor)
            part.loading = False

    def load(self) -> None:
        """Starts to load everything; `require` must precede the use of a part."""
        if self.offloaded_bytes:
            self._copier.begin()
        for part in self._parts.values():
            self._start_loading(part)

    def require(self, *names: str, changes: bool = False) -> None:
        """Makes later computation find these parts on the device; `changes` says that it will modify them."""
        for part in self._named(names):
            if part.offloaded:
                self._copier.begin()
                self._start_loading(part)
            if part.loading:
                self._copier.wait(part.loaded)
                part.loading = False
            if changes:
                self._host.mark_changed(part.current().values())
                self._drop_copies(part, list(part.copies))

    def wait_for(self, *names: str) -> None:
        """Blocks until these parts are loaded, if loading has started."""
        for part in self._named(names):
            if part.loading:
                self._copier.finish(part.loaded)

    def synchronize(self) -> None:
        """Blocks until no transfer is under way: all tensors can be read, wherever they are."""
        self._copier.finish()

    def _named(self, names: tuple[str, ...]) -> list[_Part]:
        return [self._parts[name] for name in names if name in self._parts]

    def _send(self, part: _Part, name: str, tensor: Tensor) -> None:
        if name not in part.copies:
            part.copies[name] = self._host.acquire(tensor)
        tensor.data = part.copies[name].values
        part.offloaded[name] = tensor

    def _start_loading(self, part: _Part) -> None:
        if not part.offloaded:
            return
        current = part.current()
        for name, tensor in part.offloaded.items():
            if current.get(name) is tensor:  # others were dropped by their owner in the meantime
                values = part.copies[name].values
                back = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=self._device)
                self._copier.copy(back, values)
                tensor.data = back
        part.offloaded = {}
        part.loaded, part.loading = self._copier.mark(), True

    def _drop_copies(self, part: _Part, names: list[str]) -> None:
        for name in names:
            part.offloaded.pop(name, None)
            self._host.release(part.copies.pop(name))


def _is_current(part: _Part, name: str, current: Mapping[str, Tensor]) -> bool:
    """Whether the part's copy of this name is of the tensor that has the name now."""
    return name in current and part.offloaded.get(name, current[name]) is current[name]
