"""Runs micro-batches through the stages: each stage computes what has arrived, backwards first.

Transfers overlap with computing, in both directions. Micro-batches arrive in order, and their gradients are added
in order, so that the result does not depend on the speed of links and stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from digenrl.stages.links import Direction, StageLinks
from digenrl.stages.messages import States

MEASURED = 100  # the last micro-batches

# Computes this stage's part of a micro-batch, given what the stage before hands over. The first stage is given
# nothing. The last one returns a loss.
Forward = Callable[[int, States], States]


class Pipeline:
    """The pipeline as one of its stages sees it. All stages must run the same micro-batches.

    At most `in_flight` micro-batches are between their forward and their backward; by default twice the number of
    stages, which keeps all stages busy unless links are slower than all of them.

    While `measures` is set, the stage waits for its device after each forward and backward, and `computing_s` is
    the time of a micro-batch.
    """

    def __init__(self, links: StageLinks, in_flight: int | None = None) -> None:
        self.links = links
        self.in_flight = 2 * links.count if in_flight is None else in_flight
        if self.in_flight < 1:
            raise ValueError(f"at least 1 micro-batch must be in flight, got {self.in_flight}")
        self._waiting: dict[Direction, deque[tuple[int, States]]] = {"forward": deque(), "backward": deque()}
        self.measures = False
        self._seconds: dict[Direction, deque[float]] = {
            "forward": deque(maxlen=MEASURED),
            "backward": deque(maxlen=MEASURED),
        }

    @property
    def computing_s(self) -> float:
        """The forward and backward of a micro-batch, as medians of the last ones; 0 before any was measured."""
        return sum(median(each) for each in self._seconds.values() if each)

    def train(
        self, micro_batches: int, forward: Forward, after_backward: Callable[[int], None] | None = None
    ) -> list[Tensor]:
        """Adds the gradients of all micro-batches to the parameters; returns the losses on the last stage.

        `after_backward` is called with the index of each, after its gradient was added. Raises LinkError if a link
        is lost; gradients may be incomplete then.
        """
        with self._abandon_on_error():
            return self._train(micro_batches, forward, after_backward)

    def _train(
        self, micro_batches: int, forward: Forward, after_backward: Callable[[int], None] | None
    ) -> list[Tensor]:
        links, losses = self.links, list[Tensor]()
        begun: dict[int, tuple[States, States]] = {}
        started = finished = 0
        while finished < micro_batches:
            self._receive(may_start=started < micro_batches and len(begun) < self.in_flight)
            if self._waiting["backward"]:
                index, gradients = self._next("backward", finished)
                with self._measuring("backward"):
                    _backward(begun[index][1], gradients)
            else:
                index, inputs = self._next_input(started)
                with self._measuring("forward"):
                    outputs = forward(index, inputs)
                    loss = _loss(outputs) if links.is_last else None
                begun[index] = inputs, outputs
                started += 1
                if loss is None:
                    links.send("forward", index, outputs)
                    continue
                losses.append(loss)
            if not links.is_first:
                links.send("backward", index, tuple(_gradient(each) for each in begun[index][0]))
            del begun[index]
            finished += 1
            if after_backward is not None:
                after_backward(index)
        return losses

    @contextmanager
    def _measuring(self, direction: Direction) -> Iterator[None]:
        if not self.measures:
            yield
            return
        began = perf_counter()
        yield
        if self.links.device.type == "cuda":
            torch.cuda.synchronize(self.links.device)
        self._seconds[direction].append(perf_counter() - began)

    @contextmanager
    def _abandon_on_error(self) -> Iterator[None]:
        """A stage that fails does not let the others wait."""
        try:
            yield
        except BaseException as error:
            self.links.abandon(error)
            raise

    def _receive(self, *, may_start: bool) -> None:
        """Takes all that has arrived; waits until there is a backward to do or, if it may start, a forward."""
        while (arrival := self.links.receive(wait=not self._can_continue(may_start))) is not None:
            self._waiting[arrival.direction].append((arrival.index, arrival.states))

    def _can_continue(self, may_start: bool) -> bool:
        has_input = self.links.is_first or bool(self._waiting["forward"])
        return bool(self._waiting["backward"]) or (may_start and has_input)

    def _next_input(self, expected: int) -> tuple[int, States]:
        return (expected, ()) if self.links.is_first else self._next("forward", expected)

    def _next(self, direction: Direction, expected: int) -> tuple[int, States]:
        index, states = self._waiting[direction].popleft()
        if index != expected:
            raise RuntimeError(
                f"stage {self.links.index} got micro-batch {index} {direction}, expected {expected}; all stages "
                "must run the same micro-batches"
            )
        return index, states


def _backward(outputs: States, gradients: States) -> None:
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output is not None and output.requires_grad and gradient is not None
    ]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def _loss(outputs: States) -> Tensor:
    assert len(outputs) == 1 and outputs[0] is not None, "the last stage returns a single tensor"
    loss = outputs[0]
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _gradient(state: Tensor | None) -> Tensor | None:
    return None if state is None or state.grad is None else state.grad.detach()
