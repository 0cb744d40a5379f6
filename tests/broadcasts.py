"""Weights to send, and a distribution of them among threads of this process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from digenrl.exchange.broadcast import WeightsReceiver, WeightsSender
from digenrl.records import WeightsReference

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 30.0  # never reached where all goes well


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def weights(seed: int = 0, width: int = 100) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{index}": torch.randn(width, 7, generator=generator) for index in range(5)}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def distribute(
    sender: WeightsSender,
    reference: WeightsReference,
    epoch: int,
    receivers: list[WeightsReceiver],
    threads: ThreadPoolExecutor,
) -> list[Future[None]]:
    """Sends to all receivers; returns what came of each of them, the sender's outcome last."""
    size = len(receivers) + 1
    tasks = [
        threads.submit(receiver.receive, sender.address, epoch, rank, size, reference, TIMEOUT_S)
        for rank, receiver in enumerate(receivers, start=1)
    ]
    sending = threads.submit(sender.send, reference.name, epoch, len(receivers), TIMEOUT_S)
    outcomes: list[Future[None]] = [*tasks, sending]  # type: ignore[list-item]
    for outcome in outcomes:
        outcome.exception()
    return outcomes


def arrive(
    sender: WeightsSender,
    name: str,
    tensors: dict[str, Tensor],
    epoch: int,
    receivers: list[WeightsReceiver],
    threads: ThreadPoolExecutor,
) -> WeightsReference:
    reference = sender.stage(name, tensors)
    for outcome in distribute(sender, reference, epoch, receivers, threads):
        outcome.result()
    return reference
