"""How long something takes, and how full a card gets meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from time import perf_counter

import torch

from digenrl.models.transfers import synchronize

SUSTAINED_S = 4.0  # a card that has been busy for so long has found its pace


def watch_peak(device: torch.device) -> None:
    """The peak is counted from now on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most that this process held at once since `watch_peak`, weights included; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def sustained_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the work, which is warm: on a card, which slows down under load, as it goes on and on."""
    seconds = [_seconds(work, device)]
    while device.type == "cuda" and sum(seconds) < SUSTAINED_S:
        seconds.append(_seconds(work, device))
    return fmean(seconds[len(seconds) // 2 :])


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = perf_counter()
    work()
    synchronize(device)
    return perf_counter() - began
