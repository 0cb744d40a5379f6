"""Asynchronous copies between host and GPU, through pinned memory.

A plain copy from pageable memory blocks the host until the GPU has finished all queued work, and then leaves the
GPU idle until the host queues more. A copy from or to pinned memory is queued like a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(value: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies a tensor to a device, optionally in another dtype, without blocking the host."""
    value = value if dtype is None else value.to(dtype)
    if device.type != "cuda" or value.is_cuda:
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


def to_device_like(value: Tensor, other: Tensor) -> Tensor:
    """As `to_device`, with the device and dtype of another tensor."""
    return to_device(value, other.device, other.dtype)


def copy_to_host(value: Tensor) -> Tensor:
    """Starts a copy to the host; its values are valid after `synchronize`. A CPU tensor is returned as it is."""
    if not value.is_cuda:
        return value
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has finished everything that this thread queued; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def to_host(values: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors to the host, with one synchronization per dtype however many there are."""
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
