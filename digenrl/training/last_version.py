"""The state that a batch began with, kept on the host while the batch's updates are committed.

Nothing of it changes before the first of them, so that it is copied beside the batch's first replays. Host memory
is taken once, and the same for every batch: fresh memory costs more than the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from digenrl.training.host_copies import Copied, Copies, HostCopy, HostMemory

State = dict[str, Any]


class LastVersion:
    """At most one state at a time. What it gives out holds until it forgets."""

    def __init__(self, device: torch.device, copies: Copies) -> None:
        self._copies = copies
        self._memory = HostMemory(
            device, "the state before a batch's first update takes there", "set updates_per_batch: 1"
        )
        self._taken: list[HostCopy] = []
        self._state: State | None = None
        self._made: Any = None

    @property
    def kept(self) -> bool:
        """Whether there is one, or one on its way."""
        return self._state is not None

    def reserve(self, likes: Iterable[Tensor]) -> None:
        """Takes the memory for copies of these, so that no batch has to."""
        for room in [self._memory.take(like) for like in likes]:
            self._memory.give(room)

    def keep(self, state: Callable[[Copied], State]) -> None:
        """Begins to copy a state, and does not wait."""
        self._copies.begin()
        self._state = state(self._copied)
        self._made = self._copies.mark()

    def state(self) -> State:
        """Once all of it is copied."""
        assert self._state is not None, "nothing is kept"
        self._copies.finish(self._made)
        return self._state

    def forget(self) -> None:
        """Its memory is for the next one."""
        if self._state is None:
            return
        self._copies.finish(self._made)
        for room in self._taken:
            self._memory.give(room)
        self._taken, self._state = [], None

    def _copied(self, value: Tensor) -> Tensor:
        room = self._memory.take(value)
        self._taken.append(room)
        self._copies.copy(room.values, value.detach())
        return room.values
