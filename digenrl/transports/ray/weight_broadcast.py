"""Decides which workers get which full weights, and runs one broadcast per pool at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from digenrl.exchange.deliveries import BroadcastLimits, Delivery
from digenrl.records import Committed, Exported, Job, Publish, WeightsReference
from digenrl.transports.contract import Report
from digenrl.transports.ray.actors import BROADCAST, BROADCAST_THREADS
from digenrl.transports.ray.worker_handles import WorkerHandle

MIN_TIMEOUT_S = 20.0  # for members to join
MIN_PATCH_BYTES_PER_S = 20e6  # of making a patch, during which receivers wait for the sender to join
UNMEASURED_BYTES_PER_S = 0.25e6  # of a link over which nothing was sent yet
SLOWED_DOWN = 10  # a broadcast is given up when the link is this many times slower than before


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """Weights that reached workers: bytes sent to each, the seconds it took, and their size without a patch."""

    name: str
    receivers: tuple[str, ...]
    bytes: int
    seconds: float
    whole_bytes: int


@dataclass(frozen=True, slots=True)
class _RunningBroadcast:
    pool: str
    reference: WeightsReference
    sent: Any
    received: Mapping[str, Any]  # by worker

    def awaited(self) -> list[Any]:
        """References of its calls."""
        return [self.sent, *self.received.values()]


class WeightBroadcaster:
    """Broadcasts the trainer's weights to workers that lack them, and reports each transfer to `on_transfer`.

    Workers of one pool receive together, and pools separately, so that a slow link delays its own pool only.
    Workers that hold no version, or another one, receive separately too: they need whole weights. If a broadcast
    fails, workers that still lack the weights take part in the next one. Weights that the trainer does not have
    any more, because it was replaced or because it has staged newer ones, are given up.
    """

    def __init__(self, workers: Mapping[str, WorkerHandle], on_transfer: Callable[[WeightTransfer], None]) -> None:
        self._workers, self._on_transfer = workers, on_transfer
        self._lacking: dict[str, dict[str, WeightsReference]] = {}  # by name of the weights, then by worker
        self._held: dict[str, list[str]] = {}  # names, by worker, the newest last
        self._staged: tuple[str, str] | None = None  # the sender, and the name of its weights
        self._running: list[_RunningBroadcast] = []
        self._bytes_per_s: dict[str, float] = {}  # measured in the last broadcast, by pool
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
        """References of the running broadcasts."""
        for running in self._running:
            yield from running.awaited()

    def advance(self) -> None:
        """Finishes broadcasts that have ended, and starts new ones. Does not block."""
        for running in list(self._running):
            self._finish(running)
        if self._staged is None:
            return
        sender, name = self._staged
        self._give_up_others(name)
        for (pool, held), receivers in self._groups(name).items():
            if len(self._running) < BROADCAST_THREADS:
                self._start(sender, pool, held, receivers)

    def _receiving(self) -> set[str]:
        return {worker for running in self._running for worker in running.received}

    def _give_up_others(self, name: str) -> None:
        """Gives up weights other than the staged ones, unless they are just being received."""
        receiving = self._receiving()
        for old in [other for other in self._lacking if other != name]:
            for worker in [each for each in self._lacking[old] if each not in receiving]:
                del self._lacking[old][worker]
                self._method(worker, "give_up_weights").remote(old)
            if not self._lacking[old]:
                del self._lacking[old]

    def _groups(self, name: str) -> dict[tuple[str, str], dict[str, WeightsReference]]:
        """Workers that lack the weights and can receive them, by pool and by the version that they hold."""
        groups: dict[tuple[str, str], dict[str, WeightsReference]] = {}
        receiving = self._receiving()
        for worker, reference in self._lacking.get(name, {}).items():
            if self._workers[worker].ready and worker not in receiving:
                pool, held = self._workers[worker].assignment.pool or "", self._held.get(worker, [""])[-1]
                groups.setdefault((pool, held), {})[worker] = reference
        return groups

    def _start(self, sender: str, pool: str, held: str, receivers: Mapping[str, WeightsReference]) -> None:
        self._epoch += 1
        reference = next(iter(receivers.values()))
        measured = self._bytes_per_s.get(pool)
        join_s = MIN_TIMEOUT_S + (reference.bytes / MIN_PATCH_BYTES_PER_S if held else 0.0)
        slowest = UNMEASURED_BYTES_PER_S if measured is None else measured / SLOWED_DOWN
        limits, count = BroadcastLimits(join_s + reference.bytes / slowest, join_s), len(receivers)
        address = self._method(sender, "broadcast_address").remote()
        received = {
            worker: self._method(worker, "receive_weights").remote(
                address, self._epoch, rank, count + 1, receivers[worker], limits
            )
            for rank, worker in enumerate(receivers, start=1)
        }
        send = self._method(sender, "send_weights")
        sent = send.remote(reference.name, self._epoch, count, limits, held, measured)
        self._running.append(_RunningBroadcast(pool, reference, sent, received))

    def _finish(self, running: _RunningBroadcast) -> None:
        references = running.awaited()
        if len(ray.wait(references, num_returns=len(references), timeout=0)[0]) < len(references):
            return
        self._running.remove(running)
        name = running.reference.name
        received = tuple(worker for worker, outcome in running.received.items() if _succeeded(outcome))
        for worker in received:
            if worker in self._workers:
                self._held.setdefault(worker, []).append(name)
                self._lacking.get(name, {}).pop(worker, None)
        if _succeeded(running.sent):
            sent: Delivery = ray.get(running.sent)
            self._bytes_per_s[running.pool] = max(1, sent.bytes) / max(1e-6, sent.sending_s)
            self._on_transfer(WeightTransfer(name, received, sent.bytes, sent.seconds, running.reference.bytes))
        else:
            self._bytes_per_s.pop(running.pool, None)  # the link may have become slower
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
