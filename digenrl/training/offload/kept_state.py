"""A copy of a training state in host memory, made while the computation goes on.

The same host memory is used for one state after the other: allocating it anew would cost more than the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from digenrl.training.offload.host_copies import CopyTensor, HostCopies, HostCopy

State = TypeVar("State")


class KeptState(Generic[State]):
    """Holds at most one state. What `state` returns is valid until `discard`."""

    def __init__(self, host: HostCopies) -> None:
        self._host = host
        self._held: list[tuple[Tensor, HostCopy]] = []
        self._state: State | None = None
        self._complete: Any = None

    @property
    def is_kept(self) -> bool:
        """Whether a state is kept, or being copied."""
        return self._state is not None

    def keep(self, make_state: Callable[[CopyTensor], State]) -> None:
        """Starts to copy a state, without blocking."""
        self._host.copier.begin()
        try:
            self._state = make_state(self._copy)
        except BaseException:
            self._release()
            raise
        self._complete = self._host.copier.mark()

    def state(self) -> State:
        """The kept state; blocks until it is completely copied."""
        assert self._state is not None, "no state is kept"
        self._host.copier.finish(self._complete)
        return self._state

    def before_change(self) -> None:
        """Must be called before the original tensors change; blocks until the kept state is completely copied."""
        if self.is_kept:
            self.state()
            self._host.mark_changed(tensor for tensor, _ in self._held)

    def discard(self) -> None:
        """Frees the memory for the next state."""
        self.before_change()
        self._release()
        self._state = None

    def _release(self) -> None:
        for _, copy in self._held:
            self._host.release(copy)
        self._held = []

    def _copy(self, value: Tensor) -> Tensor:
        copy = self._host.acquire(value)
        self._held.append((value, copy))
        return copy.values
