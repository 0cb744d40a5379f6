"""Measures time and peak memory."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from time import perf_counter

import torch

from digenrl.models.transfers import synchronize
from digenrl.training.ranks.rank_group import RankGroup

SUSTAINED_S = 4.0  # a GPU that has been busy this long runs at its sustained clock


def watch_peak(device: torch.device) -> None:
    """Resets the peak memory statistics."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The peak memory since `watch_peak`, weights included; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def sustained_seconds(work: Callable[[], object], device: torch.device, ranks: RankGroup | None = None) -> float:
    """Seconds of warmed-up work. On a GPU, which slows down under load, under sustained load.

    Several `ranks` that do the work together repeat it equally often.
    """
    seconds = [_seconds(work, device)]
    while _all_agree(device.type == "cuda" and sum(seconds) < SUSTAINED_S, ranks):
        seconds.append(_seconds(work, device))
    return fmean(seconds[len(seconds) // 2 :])


def _all_agree(repeat: bool, ranks: RankGroup | None) -> bool:
    return repeat if ranks is None else all(ranks.gather(repeat))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = perf_counter()
    work()
    synchronize(device)
    return perf_counter() - began
