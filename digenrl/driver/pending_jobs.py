"""Jobs that were sent to workers, matched to their results by id. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from digenrl.driver.job_deadlines import JobDeadlines, OverdueJob, owner
from digenrl.logs import describe
from digenrl.records import Job
from digenrl.transports.contract import Transport
from digenrl.worker.assignment import Assignment, rank_names

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job with a worker, and when it was sent."""

    job: Job
    sent_ns: int


@dataclass(frozen=True, slots=True)
class CompletedJob:
    """A job that has its result, and how long the worker was busy with it, as the driver saw it."""

    worker: str
    job: Job
    took_ns: int


class PendingJobs:
    """Sends jobs and remembers them until their results arrive. Jobs for an absent worker wait for it."""

    def __init__(self, transport: Transport, clock: Callable[[], int], deadlines: JobDeadlines) -> None:
        self.transport, self._clock, self.deadlines = transport, clock, deadlines
        self._sent: dict[str, dict[int, PendingJob]] = {}  # by worker, then by job id
        self._waiting: dict[str, list[Job]] = {}  # for workers that are absent
        self._last_result_ns: dict[str, int] = {}

    def start(self, assignment: Assignment) -> None:
        """Starts a worker with all its ranks, and sends what was waiting for it."""
        names = dict.fromkeys((assignment.name, *rank_names(assignment)))
        for name in names:
            self._sent[name] = {}
            self._last_result_ns.pop(name, None)
        self.deadlines.start(assignment.name)
        self.transport.start(assignment)
        for name in names:
            for job in self._waiting.pop(name, ()):
                self.send(name, job)

    def send(self, worker: str, job: Job) -> None:
        """Sends a job, or keeps it until its worker is present."""
        if worker not in self._sent:
            logger.info("%s waits for %s", describe(job), worker)
            self._waiting.setdefault(worker, []).append(job)
            return
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s sent to %s", describe(job), worker)
        if self.deadlines.is_ready(worker) and not self._is_busy(worker):
            self.deadlines.begin(worker)
        self._sent[worker][job.id] = PendingJob(job, self._clock())
        self.transport.send(worker, job)

    def complete(self, worker: str, job_id: int, now_ns: int) -> CompletedJob | None:
        """Removes a job whose result has arrived; None if it is late or doubled: no such job is pending.

        The job began when it was sent, or after the worker's last result.
        """
        pending = self._sent.get(worker, {}).pop(job_id, None)
        if pending is None:
            return None
        began_ns = max(pending.sent_ns, self._last_result_ns.get(worker, 0))
        self._last_result_ns[worker] = now_ns
        self.deadlines.finish(worker, pending.job)
        if logger.isEnabledFor(logging.DEBUG):
            took_s = (now_ns - began_ns) / 1e9
            logger.debug("%s answered by %s after %.3f s", describe(pending.job), worker, took_s)
        return CompletedJob(worker, pending.job, now_ns - began_ns)

    def ready(self, worker: str) -> None:
        """The worker has loaded everything and begins its first job."""
        self.deadlines.begin(worker)

    def overdue(self) -> OverdueJob | None:
        """A job that its worker did not finish in time."""
        if not self.deadlines.any_silent():
            return None
        pending = {worker: [each.job for each in sent.values()] for worker, sent in self._sent.items()}
        return self.deadlines.overdue(pending)

    def is_present(self, worker: str) -> bool:
        """Whether the worker was started and is not lost."""
        return worker in self._sent

    def lose(self, worker: str) -> list[Job]:
        """Forgets a lost worker; returns the jobs that it held."""
        self.deadlines.forget(worker)
        return [pending.job for pending in self._sent.pop(worker, {}).values()]

    def jobs(self) -> Iterator[Job]:
        """All jobs that have no result yet."""
        for sent in self._sent.values():
            yield from (pending.job for pending in sent.values())
        for waiting in self._waiting.values():
            yield from waiting

    def _is_busy(self, worker: str) -> bool:
        """Whether the worker or any of its ranks has a job."""
        return any(sent and owner(name) == owner(worker) for name, sent in self._sent.items())
