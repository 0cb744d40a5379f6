"""Notes which workers lack which full weights, and runs the broadcasts that bring them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from digenrl.exchange.deliveries import SLOWEST_BYTES_PER_S, BroadcastLimits, Delivery
from digenrl.records import Committed, Exported, Job, Publish, WeightsReference
from digenrl.transports.contract import Report
from digenrl.transports.ray.actors import BROADCAST, BROADCAST_THREADS
from digenrl.transports.ray.sites import Sites
from digenrl.transports.ray.weight_routes import Route, WeightReceiver, choose_routes
from digenrl.transports.ray.worker_handles import WorkerHandle

MIN_TIMEOUT_S = 20.0  # for members to join
MIN_PATCH_BYTES_PER_S = 20e6  # of making a patch, during which receivers wait for the sender to join
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
    route: Route
    reference: WeightsReference
    sent: Any
    received: Mapping[str, Any]  # by worker
    lost: set[str] = field(default_factory=set)  # workers whose replacements have the same names

    def awaited(self) -> list[Any]:
        """References of its calls."""
        return [self.sent, *self.received.values()]


class WeightBroadcaster:
    """Broadcasts the trainer's weights to workers that lack them, and reports each transfer to `on_transfer`.

    Workers of one pool receive together, and pools separately, so that a slow link delays its own pool only.
    Workers that hold no version, or another one, receive separately too: they need whole weights. All workers of
    another site than the trainer's receive together or from each other, so that its link carries a version once.
    If a broadcast fails, workers that still lack the weights take part in the next one, which is from the trainer,
    and to each pool separately, even in another site. Weights that the trainer does not have any more, because it
    was replaced or because it has staged newer ones, are given up.
    """

    def __init__(
        self, workers: Mapping[str, WorkerHandle], sites: Sites, on_transfer: Callable[[WeightTransfer], None]
    ) -> None:
        self._workers, self._sites, self._on_transfer = workers, sites, on_transfer
        self._lacking: dict[str, dict[str, WeightsReference]] = {}  # by name of the weights, then by worker
        self._held: dict[str, list[str]] = {}  # the last two names, by worker, the newest last
        self._staged: tuple[str, str] | None = None  # the sender, and the name of its weights
        self._running: list[_RunningBroadcast] = []
        self._failed: set[tuple[str, str]] = set()  # names of weights and sites in which a broadcast failed
        self._bytes_per_s: dict[str, float] = {}  # measured in the last broadcast, by link
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
        self._held.pop(worker, None)
        for running in self._running:
            running.lost.add(worker)
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
        self._failed = {failed for failed in self._failed if failed[0] == name}
        for route in self._routes(sender, name):
            if sum(running.route.sender == route.sender for running in self._running) < BROADCAST_THREADS:
                self._start(name, route)

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

    def _routes(self, sender: str, name: str) -> list[Route]:
        """Routes for workers that lack the weights and can receive them."""
        receiving = self._receiving()
        receivers = [
            WeightReceiver(
                worker,
                self._workers[worker].assignment.pool or "",
                self._site(worker, sender, name),
                self._held.get(worker, [""])[-1],
            )
            for worker in self._lacking.get(name, {})
            if self._workers[worker].ready and worker not in receiving
        ]
        if not receivers:
            return []
        holders = [worker for worker, held in self._held.items() if held[-1] == name]
        forwarders = {self._site(worker, sender, name): worker for worker in reversed(holders)}
        arriving = {running.route.site for running in self._running if running.reference.name == name}
        return choose_routes(receivers, sender, forwarders, arriving)

    def _site(self, worker: str, sender: str, name: str) -> str:
        """The site in which a worker shares a transfer with others; empty if it receives with its pool."""
        site = self._sites.beyond_a_link(self._workers[worker].node_id, self._workers[sender].node_id)
        return "" if (name, site) in self._failed else site

    def _start(self, name: str, route: Route) -> None:
        self._epoch += 1
        references = [self._lacking[name][worker] for worker in route.receivers]
        measured, size, count = self._bytes_per_s.get(route.link), references[0].bytes, len(references)
        join_s = MIN_TIMEOUT_S + (size / MIN_PATCH_BYTES_PER_S if route.held else 0.0)
        slowest = SLOWEST_BYTES_PER_S if measured is None else measured / SLOWED_DOWN
        limits = BroadcastLimits(join_s + size / slowest, join_s)
        address = self._method(route.sender, "broadcast_address").remote()
        received = {
            worker: self._method(worker, "receive_weights").remote(
                address, self._epoch, rank, count + 1, references[rank - 1], limits
            )
            for rank, worker in enumerate(route.receivers, start=1)
        }
        send = self._method(route.sender, "send_weights")
        sent = send.remote(name, self._epoch, count, limits, route.held, measured)
        self._running.append(_RunningBroadcast(route, references[0], sent, received))

    def _finish(self, running: _RunningBroadcast) -> None:
        references = running.awaited()
        if len(ray.wait(references, num_returns=len(references), timeout=0)[0]) < len(references):
            return
        self._running.remove(running)
        name = running.reference.name
        present = {worker: each for worker, each in running.received.items() if worker not in running.lost}
        received = tuple(worker for worker, outcome in present.items() if _succeeded(outcome))
        for worker in received:
            if worker in self._workers:
                self._held[worker] = [*self._held.get(worker, [])[-1:], name]
                self._lacking.get(name, {}).pop(worker, None)
        if _succeeded(running.sent):
            sent: Delivery = ray.get(running.sent)
            self._bytes_per_s[running.route.link] = max(1, sent.bytes) / max(1e-6, sent.sending_s)
            self._on_transfer(WeightTransfer(name, received, sent.bytes, sent.seconds, running.reference.bytes))
        else:
            self._bytes_per_s.pop(running.route.link, None)  # the link may have become slower
            self._failed.add((name, running.route.site))
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
