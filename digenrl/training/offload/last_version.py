"""The state that a batch began with, kept on the host while the batch's updates are committed.

Nothing of it changes before the first of them, so that it is copied beside the batch's first replays. Host memory
is taken once, and the same for every batch: fresh memory costs more than the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from digenrl.training.offload.host_copies import Copied, HostCopies, HostCopy

State = dict[str, Any]


class LastVersion:
    """At most one state at a time. What it gives out holds until it forgets."""

    def __init__(self, host: HostCopies) -> None:
        self._host = host
        self._held: list[tuple[Tensor, HostCopy]] = []
        self._state: State | None = None
        self._made: Any = None

    @property
    def kept(self) -> bool:
        """Whether there is one, or one on its way."""
        return self._state is not None

    def keep(self, state: Callable[[Copied], State]) -> None:
        """Begins to copy a state, and does not wait."""
        self._host.copies.begin()
        try:
            self._state = state(self._copied)
        except BaseException:
            self._let_go()
            raise
        self._made = self._host.copies.mark()

    def state(self) -> State:
        """Once all of it is copied."""
        assert self._state is not None, "nothing is kept"
        self._host.copies.finish(self._made)
        return self._state

    def leave(self) -> None:
        """What the state is of is about to change; the state stays, once all of it is copied."""
        if self.kept:
            self.state()
            self._host.changed(tensor for tensor, _ in self._held)

    def forget(self) -> None:
        """The memory is for the next one."""
        self.leave()
        self._let_go()
        self._state = None

    def _let_go(self) -> None:
        for _, copy in self._held:
            self._host.let_go(copy)
        self._held = []

    def _copied(self, value: Tensor) -> Tensor:
        copy = self._host.hold(value)
        self._held.append((value, copy))
        return copy.values
