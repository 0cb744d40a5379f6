"""All workers in this very process: for one device, and as the baseline that takes turns.

One of them has the device and works here, when somebody waits for reports. Those that score have a thread each,
and do so meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.records import Job
from digenrl.transports.contract import Gone, Message, Report
from digenrl.transports.thread_worker import ThreadWorker
from digenrl.worker.assignment import Assignment
from digenrl.worker.worker import Worker, start_worker


class InlineTransport:
    """Orders are carried out one by one, but for those of workers that do nothing but score."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._asides: dict[str, ThreadWorker] = {}
        self._arrived: deque[Message] = deque()
        self._orders: deque[tuple[str, int, Job]] = deque()
        self._done_aside: SimpleQueue[tuple[ThreadWorker, int | None, Report, int]] = SimpleQueue()

    def start(self, assignment: Assignment) -> None:
        """Builds the worker at once, and here: libraries have settings that hold for all threads."""
        assert assignment.exchange is not None
        worker, report = start_worker(assignment, TensorExchange(ExchangeFolder(assignment.exchange)))
        if worker is not None and assignment.duties == {"score"}:
            self._asides[assignment.name] = ThreadWorker(assignment.name, worker, self._take_report)
        elif worker is not None:
            self._workers[assignment.name] = worker
        self._arrived.append(Message(assignment.name, None, report))

    def has_room(self, assignment: Assignment) -> bool:
        """Always."""
        return True

    def send(self, worker: str, job_id: int, order: Job) -> None:
        """Begins at once beside the others, or waits for `receive`."""
        if worker in self._asides:
            self._asides[worker].send(job_id, order)
        elif worker in self._workers:
            self._orders.append((worker, job_id, order))

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """One report: of what was done aside or, if there is none, of the oldest order, which is carried out."""
        if not self._arrived:
            self._wait_for_report(timeout_s)
        return [self._arrived.popleft()] if self._arrived else []

    def end(self, worker: str) -> None:
        """Lets go of it, of its orders and of its reports."""
        self._workers.pop(worker, None)
        self._orders = deque(each for each in self._orders if each[0] != worker)
        self._arrived = deque(each for each in self._arrived if each.worker != worker)
        if worker in self._asides:
            self._asides.pop(worker).leave()

    def stop(self) -> None:
        """Lets go of the workers; no thread stays."""
        asides, self._asides = list(self._asides.values()), {}
        self._workers.clear()
        self._orders.clear()
        for aside in asides:
            aside.leave()
        for aside in asides:
            aside.join()

    def _take_report(self, aside: ThreadWorker, job_id: int | None, report: Report, at_ns: int) -> None:
        self._done_aside.put((aside, job_id, report, at_ns))

    def _wait_for_report(self, timeout_s: float) -> None:
        self._take_reports_aside(0.0 if self._orders else timeout_s)
        if self._arrived or not self._orders:
            return  # what follows from them begins while the device works
        name, job_id, order = self._orders.popleft()
        report = self._workers[name].handle(order)
        self._take_reports_aside(0.0)
        self._arrived.append(Message(name, job_id, report))

    def _take_reports_aside(self, timeout_s: float) -> None:
        """All that are there; waits for the first for so long, if somebody is at work."""
        while any(aside.under_way for aside in self._asides.values()):
            try:
                aside, job_id, report, at_ns = self._done_aside.get(timeout=0.0 if self._arrived else timeout_s)
            except Empty:
                return
            aside.under_way -= 1
            if self._asides.get(aside.name) is not aside:
                continue  # it was ended meanwhile
            self._arrived.append(Message(aside.name, job_id, report, time.monotonic_ns() - at_ns))
            if isinstance(report, Gone):
                del self._asides[aside.name]
