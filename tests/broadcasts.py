"""Weights to broadcast, and broadcasts among threads of this process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from digenrl.exchange.broadcast import WeightsSender, receive_version
from digenrl.exchange.deliveries import STALL_TIMEOUT_S, BroadcastLimits, Delivery
from digenrl.records import WeightsReference

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 30.0  # only reached by tests that fail


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def weights(seed: int = 0, width: int = 100) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{index}": torch.randn(width, 7, generator=generator) for index in range(5)}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def within(timeout_s: float, stall_timeout_s: float = STALL_TIMEOUT_S) -> BroadcastLimits:
    return BroadcastLimits(timeout_s, timeout_s, stall_timeout_s)


def receive_weights(
    address: str,
    epoch: int,
    rank: int,
    size: int,
    reference: WeightsReference,
    timeout_s: float,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> dict[str, Tensor]:
    """Receives whole weights."""
    limits = within(timeout_s, stall_timeout_s)
    return receive_version(address, epoch, rank, size, reference, limits).tensors()


def attempt(
    sender: WeightsSender, reference: WeightsReference, epoch: int, receivers: int, threads: ThreadPoolExecutor
) -> tuple[list[Future[dict[str, Tensor]]], Future[Delivery]]:
    """Broadcasts staged weights; returns the finished futures of the receivers and of the sender."""
    received = [
        threads.submit(receive_weights, sender.address, epoch, rank, receivers + 1, reference, TIMEOUT_S)
        for rank in range(1, receivers + 1)
    ]
    sent = threads.submit(sender.send, reference.name, epoch, receivers, within(TIMEOUT_S))
    for outcome in (*received, sent):
        outcome.exception()
    return received, sent


def broadcast(
    sender: WeightsSender, reference: WeightsReference, epoch: int, receivers: int, threads: ThreadPoolExecutor
) -> list[dict[str, Tensor]]:
    """What each receiver gets in a broadcast that succeeds."""
    received, sent = attempt(sender, reference, epoch, receivers, threads)
    sent.result()
    return [each.result() for each in received]
