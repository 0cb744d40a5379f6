"""One worker with all duties in this very process: for one device, and as the baseline that takes turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from digenrl.runtimes.transport import Message
from digenrl.workers.assignment import Assignment
from digenrl.workers.orders import Order
from digenrl.workers.worker import Worker, start_worker


class InProcessTransport:
    """Orders are carried out one by one, when somebody waits for reports."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._started: deque[Message] = deque()
        self._orders: deque[tuple[str, Order]] = deque()

    def start(self, assignment: Assignment) -> None:
        """Builds the worker at once."""
        worker, report = start_worker(assignment)
        if worker is not None:
            self._workers[assignment.name] = worker
        self._started.append(Message(assignment.name, report))

    def send(self, worker: str, order: Order) -> None:
        """Waits for `receive`."""
        self._orders.append((worker, order))

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """Carries out the oldest order."""
        if self._started:
            return [self._started.popleft()]
        if not self._orders:
            return []
        name, order = self._orders.popleft()
        return [Message(name, self._workers[name].handle(order))]

    def stop(self) -> None:
        """Lets go of the workers."""
        self._workers.clear()
        self._orders.clear()
