"""Full weights on their way: who lacks which version, and who sends it to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from digenrl.records import Committed, Exported, Job, Publish, WeightsReference
from digenrl.transports.contract import Report
from digenrl.transports.ray.actors import WIRE
from digenrl.transports.ray.members import Member

SHORTEST_TIMEOUT_S = 20.0
SLOWEST_BYTES_PER_S = 20e6


@dataclass(frozen=True, slots=True)
class Delivery:
    """Weights that reached workers: their size, and how long it took."""

    name: str
    receivers: tuple[str, ...]
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _UnderWay:
    reference: WeightsReference
    sent: Any
    received: Mapping[str, Any]  # by worker


class WeightBroadcast:
    """Starts a distribution whenever somebody lacks weights that the trainer has, one at a time.

    If it fails, whoever still lacks them takes part in the next one. Weights that a trainer which takes another's
    place does not have are given up.
    """

    def __init__(self, members: Mapping[str, Member], tell: Callable[[Delivery], None]) -> None:
        self._members, self._tell = members, tell
        self._lacking: dict[str, dict[str, WeightsReference]] = {}  # by weights' name, then by worker
        self._has: dict[str, set[str]] = {}
        self._staged: tuple[str, str] | None = None  # the sender, and the weights that it has
        self._under_way: _UnderWay | None = None
        self._epoch = 0

    def ordered(self, worker: str, order: Job) -> None:
        """An order was sent: it may need weights."""
        if isinstance(order, Publish):
            name = order.weights.name
            if name not in self._has.get(worker, ()) and "train" not in self._members[worker].assignment.duties:
                self._lacking.setdefault(name, {})[worker] = order.weights

    def reported(self, worker: str, report: Report) -> None:
        """A report came: there may be new weights."""
        if isinstance(report, Committed | Exported) and report.weights.name:
            self._staged = (worker, report.weights.name)

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self._has.pop(worker, None)
        for lacking in self._lacking.values():
            lacking.pop(worker, None)
        if self._staged is not None and self._staged[0] == worker:
            self._staged = None

    def awaited(self) -> Iterator[Any]:
        """What ends the distribution that is under way."""
        if self._under_way is not None:
            yield self._under_way.sent
            yield from self._under_way.received.values()

    def go_on(self) -> None:
        """Notes what has ended, and starts what can be started. Does not wait."""
        if self._under_way is not None:
            self._note_end(self._under_way)
        if self._under_way is None and self._staged is not None:
            self._start(*self._staged)

    def _start(self, sender: str, name: str) -> None:
        for old in [other for other in self._lacking if other != name]:
            for worker in self._lacking.pop(old):
                self._on_wire(worker, "give_up_weights").remote(old)
        lacking = self._lacking.get(name, {})
        receivers = {worker: it for worker, it in lacking.items() if self._members[worker].ready}
        if not receivers:
            return
        self._epoch += 1
        reference = next(iter(receivers.values()))
        timeout_s = SHORTEST_TIMEOUT_S + reference.bytes / SLOWEST_BYTES_PER_S
        address = self._on_wire(sender, "wire_address").remote()
        size = len(receivers) + 1
        received = {
            worker: self._on_wire(worker, "receive_weights").remote(
                address, self._epoch, rank, size, it, timeout_s
            )
            for rank, (worker, it) in enumerate(receivers.items(), start=1)
        }
        sent = self._on_wire(sender, "send_weights").remote(name, self._epoch, len(receivers), timeout_s)
        self._under_way = _UnderWay(reference, sent, received)

    def _note_end(self, under_way: _UnderWay) -> None:
        references = [under_way.sent, *under_way.received.values()]
        if len(ray.wait(references, num_returns=len(references), timeout=0)[0]) < len(references):
            return
        self._under_way = None
        name = under_way.reference.name
        arrived = tuple(worker for worker, it in under_way.received.items() if _outcome(it) is not None)
        for worker in arrived:
            if worker in self._members:
                self._has.setdefault(worker, set()).add(name)
                self._lacking.get(name, {}).pop(worker, None)
        sent = _outcome(under_way.sent)
        if sent is not None:
            self._tell(Delivery(name, arrived, *sent[0]))
        if not self._lacking.get(name, True):
            del self._lacking[name]

    def _on_wire(self, worker: str, method: str) -> Any:
        return getattr(self._members[worker].actor, method).options(concurrency_group=WIRE)


def _outcome(reference: Any) -> tuple[Any] | None:
    """What a call came to, in a tuple; None if it failed."""
    try:
        return (ray.get(reference),)
    except ray.exceptions.RayError:  # somebody died, or the connection: it is tried again
        return None
