"""Finds where a GPU would wait for the host, without a GPU: the meta device takes its place.

Reading a value from it is an error, and copies from the host can be observed.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from digenrl.models import transfers


class HostVisits(TorchDispatchMode):
    """Records operations on tensors of two devices, and copies between them.

    Copies made by `transfers` are exempt: they go through pinned memory and do not block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        devices = {each.device for each in tensors_in((*arguments, *(named or {}).values(), result))}
        if len(devices) > 1:
            callers = traceback.walk_stack(None)
            if not any(frame.f_code.co_filename == transfers.__file__ for frame, _ in callers):
                self.found.append(f"{function}\n" + "".join(traceback.format_stack(limit=8)))
        return result


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among these values and in their lists; torch's own search takes longer than a tiny forward."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not support autocast on the meta device, even if it is disabled."""
    monkeypatch.setattr(torch, "autocast", lambda *_arguments, **_named: nullcontext())
