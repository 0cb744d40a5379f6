"""The blocks of a model that one process computes, and the states that it exchanges with the stages around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from digenrl.stages.messages import States

Result = TypeVar("Result")


class OwnBlocks:
    """The blocks `first` to `end` - 1 of a chain of `blocks`. All forwards of the model must be run by `run`."""

    def __init__(self, first: int, end: int, blocks: int) -> None:
        self.first, self.end, self.blocks = first, end, blocks
        self._received: Iterator[Tensor] | None = None
        self._handed: list[Tensor] | None = None
        self._alone = False

    @property
    def is_last(self) -> bool:
        """Whether no block follows, so that forwards return a velocity."""
        return self.end == self.blocks

    def run(self, received: States, forward: Callable[[], Result]) -> tuple[Result, States]:
        """Runs a function with any number of forwards of the model.

        `received` are the states from the stage before, of all these forwards. Returns the function's result,
        which is meaningless unless this is the last stage, and the states for the stage after.
        """
        self._received, self._handed = (value for value in received if value is not None), []
        try:
            result = forward()
            if next(self._received, None) is not None:
                raise RuntimeError(f"{len(received)} states were received, more than the forwards have taken")
            return result, tuple(self._handed)
        finally:
            self._received = self._handed = None

    @contextmanager
    def without_others(self) -> Iterator[None]:
        """Inside, forwards leave out the blocks of other stages. The velocity is meaningless: for measurements."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def receive_states(self, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The received states of the next forward, in the place of these, which have the same shapes."""
        if self._alone:
            return states
        assert self._received is not None, "forwards of a model in stages are run by OwnBlocks.run"
        received = tuple(next(self._received) for _ in states)
        if [each.shape for each in received] != [each.shape for each in states]:
            raise RuntimeError(
                f"received states of shapes {[tuple(each.shape) for each in received]}, expected "
                f"{[tuple(each.shape) for each in states]}; all stages must run the same forwards"
            )
        return received

    def send_states(self, block: nn.Module, arguments: Any, output: Any) -> None:
        """Notes what the last of these blocks has returned: a forward hook."""
        if self._handed is None:
            return  # a backward computes a checkpointed block again
        self._handed += [output] if isinstance(output, Tensor) else [each for each in output if each is not None]
