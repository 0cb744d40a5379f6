"""A worker in a thread of its own, beside whatever else this process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from digenrl.records import Job
from digenrl.transports.contract import Gone, Report
from digenrl.worker.worker import Worker

PATIENCE_S = 5.0  # for an order under way; a thread cannot be ended, but this one does not keep the process alive


class ThreadWorker:
    """Carries out orders in a thread; `report` is called there, with each report and when it was made.

    Moments are nanoseconds of the monotonic clock. `under_way` counts orders; who takes their reports counts down.
    """

    def __init__(
        self, name: str, worker: Worker, report: Callable[[ThreadWorker, int | None, Report, int], None]
    ) -> None:
        self.name, self.under_way = name, 0
        self._worker, self._report = worker, report
        self._orders: SimpleQueue[tuple[int, Job] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def send(self, job_id: int, order: Job) -> None:
        """Is carried out after those before it."""
        self.under_way += 1
        self._orders.put((job_id, order))

    def leave(self) -> None:
        """After the order under way it takes no other."""
        self._orders.put(None)

    def join(self) -> None:
        """Waits until it has left, but not for ever."""
        self._thread.join(PATIENCE_S)

    def _serve(self) -> None:
        while (job := self._orders.get()) is not None:
            job_id, order = job
            try:
                report = self._worker.handle(order)
            except SystemExit as left:  # it would have ended a process of its own
                self._report(self, None, Gone(f"left with exit code {left.code}"), time.monotonic_ns())
                return
            self._report(self, job_id, report, time.monotonic_ns())
