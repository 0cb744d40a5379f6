"""Finds where work on a card would stop for the host, without a card: the meta device stands for it.

There a value that the host asks for is an error, and copies from the host can be seen.
"""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from digenrl.models import transfers


class HostVisits(TorchDispatchMode):
    """Notes what is computed from tensors on two devices at once, or copied between them.

    Not what `transfers` copies: through pinned memory, which nobody waits for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        tensors = [each for each in tree_leaves((arguments, named, result)) if isinstance(each, Tensor)]
        if len({each.device for each in tensors}) > 1:
            callers = traceback.walk_stack(None)
            if not any(frame.f_code.co_filename == transfers.__file__ for frame, _ in callers):
                self.found.append(f"{function}\n" + "".join(traceback.format_stack(limit=8)))
        return result


def without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses it on the meta device, even switched off."""
    monkeypatch.setattr(torch, "autocast", lambda *_arguments, **_named: nullcontext())
