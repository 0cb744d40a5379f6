"""Copies between a GPU and host memory, on a stream of their own.

A copy on the stream of the computing would wait for all passes that are queued there, also for later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from digenrl.stages.messages import States


@contextmanager
def beside_computing(device: torch.device) -> Iterator[None]:
    """Inside, this thread uses another stream of a GPU than the one that computes."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def when_computed(device: torch.device) -> Callable[[], bool]:
    """Tells whether the device has computed all that this thread has given it so far."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.query


def used_for_computing(states: States) -> States:
    """The states, after they are complete. Their memory is not used again before the computing has read them."""
    for value in states:
        if value is not None and value.device.type == "cuda":
            torch.cuda.current_stream(value.device).synchronize()
            value.record_stream(torch.cuda.default_stream(value.device))
    return states
