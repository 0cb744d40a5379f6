"""Tensors on their way to a card and back, so that nobody waits in the middle of its work.

A plain copy makes the host wait until the card has done everything it was told, and then the card waits for the
host. Through pinned memory a copy takes its turn like any other work; torch keeps that memory until it is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sent(value: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on this device, in another type if one is given; nobody waits for it to arrive."""
    value = value if dtype is None else value.to(dtype)
    if device.type != "cuda" or value.is_cuda:
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


def sent_like(value: Tensor, other: Tensor) -> Tensor:
    """The tensor where the other is, and of its type."""
    return sent(value, other.device, other.dtype)


def leaving(value: Tensor) -> Tensor:
    """A copy on the host, to be read once `wait_for` has returned; of what is there already, the tensor itself."""
    if not value.is_cuda:
        return value
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Returns when a card has done everything it was told by this thread; on a CPU that is always so."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def fetched(values: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the host; however many they are, a card is waited for once for each of their types."""
    places: dict[torch.dtype, list[int]] = {}
    for place, value in enumerate(values):
        if value.is_cuda:
            places.setdefault(value.dtype, []).append(place)
    on_host = list(values)
    for chosen in places.values():
        flat = torch.cat([values[place].reshape(-1) for place in chosen]).cpu()
        parts = torch.split(flat, [values[place].numel() for place in chosen])
        for place, part in zip(chosen, parts, strict=True):
            on_host[place] = part.view(values[place].shape)
    return on_host
