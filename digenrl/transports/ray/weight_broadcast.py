"""Decides which workers get which full weights, and runs one broadcast at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from digenrl.records import Committed, Exported, Job, Publish, WeightsReference
from digenrl.transports.contract import Report
from digenrl.transports.ray.actors import BROADCAST
from digenrl.transports.ray.worker_handles import WorkerHandle

MIN_TIMEOUT_S = 20.0
MIN_BYTES_PER_S = 20e6


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """Weights that reached workers: their size, and the seconds it took."""

    name: str
    receivers: tuple[str, ...]
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _RunningBroadcast:
    reference: WeightsReference
    sent: Any
    received: Mapping[str, Any]  # by worker


class WeightBroadcaster:
    """Broadcasts the trainer's weights to workers that lack them, and reports each transfer to `on_transfer`.

    If a broadcast fails, workers that still lack the weights take part in the next one. Weights that the trainer
    does not have any more, because it was replaced, are given up.
    """

    def __init__(self, workers: Mapping[str, WorkerHandle], on_transfer: Callable[[WeightTransfer], None]) -> None:
        self._workers, self._on_transfer = workers, on_transfer
        self._lacking: dict[str, dict[str, WeightsReference]] = {}  # by name of the weights, then by worker
        self._held: dict[str, set[str]] = {}  # names, by worker
        self._staged: tuple[str, str] | None = None  # the sender, and the name of its weights
        self._running: _RunningBroadcast | None = None
        self._epoch = 0

    def job_sent(self, worker: str, job: Job) -> None:
        """Notes the weights that a job needs."""
        if isinstance(job, Publish):
            name = job.weights.name
            commits = self._workers[worker].assignment.commits
            if not commits and name not in self._held.get(worker, ()):
                self._lacking.setdefault(name, {})[worker] = job.weights

    def report_received(self, worker: str, report: Report) -> None:
        """Notes new weights."""
        if isinstance(report, Committed | Exported) and report.weights.name:
            self._staged = (worker, report.weights.name)

    def forget(self, worker: str) -> None:
        """Forgets a worker that is gone."""
        self._held.pop(worker, None)
        for lacking in self._lacking.values():
            lacking.pop(worker, None)
        if self._staged is not None and self._staged[0] == worker:
            self._staged = None

    def awaited(self) -> Iterator[Any]:
        """References of the running broadcast."""
        if self._running is not None:
            yield self._running.sent
            yield from self._running.received.values()

    def advance(self) -> None:
        """Finishes a broadcast that has ended, and starts the next one. Does not block."""
        if self._running is not None:
            self._finish(self._running)
        if self._running is None and self._staged is not None:
            self._start(*self._staged)

    def _start(self, sender: str, name: str) -> None:
        for old in [other for other in self._lacking if other != name]:
            for worker in self._lacking.pop(old):
                self._method(worker, "give_up_weights").remote(old)
        lacking = self._lacking.get(name, {})
        receivers = {worker: reference for worker, reference in lacking.items() if self._workers[worker].ready}
        if not receivers:
            return
        self._epoch += 1
        size = len(receivers) + 1
        reference = next(iter(receivers.values()))
        timeout_s = MIN_TIMEOUT_S + reference.bytes / MIN_BYTES_PER_S
        address = self._method(sender, "broadcast_address").remote()
        received = {
            worker: self._method(worker, "receive_weights").remote(
                address, self._epoch, rank, size, receivers[worker], timeout_s
            )
            for rank, worker in enumerate(receivers, start=1)
        }
        sent = self._method(sender, "send_weights").remote(name, self._epoch, len(receivers), timeout_s)
        self._running = _RunningBroadcast(reference, sent, received)

    def _finish(self, running: _RunningBroadcast) -> None:
        references = list(self.awaited())
        if len(ray.wait(references, num_returns=len(references), timeout=0)[0]) < len(references):
            return
        self._running = None
        name = running.reference.name
        received = tuple(worker for worker, outcome in running.received.items() if _succeeded(outcome))
        for worker in received:
            if worker in self._workers:
                self._held.setdefault(worker, set()).add(name)
                self._lacking.get(name, {}).pop(worker, None)
        if _succeeded(running.sent):
            self._on_transfer(WeightTransfer(name, received, running.reference.bytes, ray.get(running.sent)))
        if not self._lacking.get(name, True):
            del self._lacking[name]

    def _method(self, worker: str, method: str) -> Any:
        return getattr(self._workers[worker].actor, method).options(concurrency_group=BROADCAST)


def _succeeded(reference: Any) -> bool:
    try:
        ray.get(reference)
    except ray.exceptions.RayError:  # a worker or a connection died: the next broadcast tries again
        return False
    return True
