"""One worker with all duties in this very process: for one device, and as the baseline that takes turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
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
        assert assignment.exchange is not None
        worker, report = start_worker(assignment, TensorExchange(ExchangeFolder(assignment.exchange)))
        if worker is not None:
            self._workers[assignment.name] = worker
        self._started.append(Message(assignment.name, report))

    def has_room(self, assignment: Assignment) -> bool:
        """Always."""
        return True

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

    def end(self, worker: str) -> None:
        """Lets go of it, and of its orders."""
        self._workers.pop(worker, None)
        self._orders = deque(each for each in self._orders if each[0] != worker)

    def stop(self) -> None:
        """Lets go of the workers."""
        self._workers.clear()
        self._orders.clear()
