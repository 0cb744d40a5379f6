"""How full a card gets while something is done on it."""

from __future__ import annotations

import torch


def watch_peak(device: torch.device) -> None:
    """The peak is counted from now on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most that this process held at once since `watch_peak`, weights included; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
