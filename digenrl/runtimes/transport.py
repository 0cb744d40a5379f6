"""How orders reach workers and reports come back: all that a runtime knows about processes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from digenrl.workers.assignment import Assignment
from digenrl.workers.orders import Order, Report


@dataclass(frozen=True, slots=True)
class Gone(Report):
    """The worker is no more; its orders are not answered."""

    reason: str


@dataclass(frozen=True, slots=True)
class Message:
    """A report and its worker."""

    worker: str
    report: Report


class Transport(Protocol):
    """Workers by name. Each answers its orders in the order in which they were sent."""

    def start(self, assignment: Assignment) -> None:
        """Starts a worker; its first report is Ready, or OrderFailed if it cannot be built."""

    def send(self, worker: str, order: Order) -> None:
        """Hands over an order; to a worker that is gone, this does nothing."""

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """Everything that has arrived; waits for the first for so long."""

    def stop(self) -> None:
        """Ends all workers; may be called twice."""
