"""All workers in this process, for runs on one device.

The worker that owns the device runs its jobs when the driver waits for messages. Workers that only score have a
thread each and run beside it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.records import Job
from digenrl.transports.contract import Gone, Message
from digenrl.transports.thread_worker import JobEnded, ThreadWorker
from digenrl.worker.assignment import Assignment
from digenrl.worker.worker import Worker, start_worker


class InlineTransport:
    """Runs jobs one at a time, except for those of workers that only score."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._threads: dict[str, ThreadWorker] = {}
        self._messages: deque[Message] = deque()
        self._jobs: deque[tuple[str, Job]] = deque()
        self._ended: SimpleQueue[JobEnded] = SimpleQueue()

    def start(self, assignment: Assignment) -> None:
        # Every worker is built in this thread: some settings of libraries are global.
        assert assignment.exchange is not None
        worker, report = start_worker(assignment, TensorExchange(ExchangeFolder(assignment.exchange)))
        if worker is not None and assignment.duties == {"score"}:
            self._threads[assignment.name] = ThreadWorker(assignment.name, worker, self._ended.put)
        elif worker is not None:
            self._workers[assignment.name] = worker
        self._messages.append(Message(assignment.name, None, report))

    def has_capacity(self, assignment: Assignment) -> bool:
        return True

    def send(self, worker: str, job: Job) -> None:
        if worker in self._threads:
            self._threads[worker].send(job)
        elif worker in self._workers:
            self._jobs.append((worker, job))

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """One message: from a thread or, if there is none, of the oldest job, which is run now."""
        if not self._messages:
            self._wait_for_message(timeout_s)
        return [self._messages.popleft()] if self._messages else []

    def end(self, worker: str) -> None:
        self._workers.pop(worker, None)
        self._jobs = deque(each for each in self._jobs if each[0] != worker)
        self._messages = deque(each for each in self._messages if each.worker != worker)
        if worker in self._threads:
            self._threads.pop(worker).close()

    def stop(self) -> None:
        threads, self._threads = list(self._threads.values()), {}
        self._workers.clear()
        self._jobs.clear()
        for thread in threads:
            thread.close()
        for thread in threads:
            thread.join()

    def _wait_for_message(self, timeout_s: float) -> None:
        self._collect_from_threads(0.0 if self._jobs else timeout_s)
        if self._messages or not self._jobs:
            return  # jobs that follow from these messages can start before the device is busy again
        name, job = self._jobs.popleft()
        report = self._workers[name].handle(job)
        self._collect_from_threads(0.0)
        self._messages.append(Message(name, job.id, report))

    def _collect_from_threads(self, timeout_s: float) -> None:
        """Takes all finished jobs; waits for the first one up to the timeout, if any is pending."""
        while any(thread.pending for thread in self._threads.values()):
            try:
                ended = self._ended.get(timeout=0.0 if self._messages else timeout_s)
            except Empty:
                return
            thread, name = ended.thread, ended.thread.name
            thread.pending -= 1
            if self._threads.get(name) is not thread:
                continue  # the worker was ended
            self._messages.append(Message(name, ended.job_id, ended.report, time.monotonic_ns() - ended.at_ns))
            if isinstance(ended.report, Gone):
                del self._threads[name]
