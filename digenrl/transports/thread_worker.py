"""A worker in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from digenrl.records import Job
from digenrl.transports.contract import Gone, Report
from digenrl.worker.worker import Worker

JOIN_TIMEOUT_S = 5.0  # a thread cannot be killed; as a daemon it does not keep the process alive


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A report, and when it was made, in nanoseconds of the monotonic clock. `job_id` is None for Gone."""

    thread: ThreadWorker
    job_id: int | None
    report: Report
    at_ns: int


class ThreadWorker:
    """Runs jobs in a thread, and calls `on_end` there after each. The caller decrements `pending` for each."""

    def __init__(self, name: str, worker: Worker, on_end: Callable[[JobEnded], None]) -> None:
        self.name, self.pending = name, 0
        self._worker, self._on_end = worker, on_end
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def send(self, job: Job) -> None:
        self.pending += 1
        self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread after the jobs that were sent before."""
        self._jobs.put(None)

    def join(self) -> None:
        """Waits for the thread to end, with a timeout."""
        self._thread.join(JOIN_TIMEOUT_S)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                report = self._worker.handle(job)
            except SystemExit as exited:  # in a worker process this would have ended the process
                gone = Gone(f"left with exit code {exited.code}")
                self._on_end(JobEnded(self, None, gone, time.monotonic_ns()))
                return
            self._on_end(JobEnded(self, job.id, report, time.monotonic_ns()))
