"""Deadlines of jobs: how long a worker may be busy with one before it counts as hanging. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from digenrl.records import Calibrate, Encode, Evaluate, Generate, Job, Publish, Score
from digenrl.transports.active_clock import ActiveClock

FACTOR = 10  # a job may take this many times as long as the longest of its kind so far
# Times the patience, for loading, and for the first job of its kind: it may compile, or time many sizes.
UNTIMED_FACTOR = 30
LONGEST_PAUSE_S = 5.0  # of the driver between two looks that counts for a worker
SCORING = (Calibrate, Generate, Score, Evaluate)  # jobs that may wait for a reward
INDEPENDENT = (Encode, Generate, Score, Evaluate)  # jobs that never wait for another worker


@dataclass(frozen=True, slots=True)
class OverdueJob:
    """A job that its worker did not finish in time."""

    worker: str
    job: Job
    waited_s: float


class JobDeadlines:
    """Times the jobs of workers, and finds those that take too long.

    A deadline is learned from the jobs of the same kind, and is never shorter than `patience_s`, nor than the time
    that rewards may take by their own limits, `scoring_s`. All ranks of a worker count together: any result is
    progress. The first weights of a worker are whole and may cross a link that no other weights have crossed,
    which delivers `link_bytes_per_s` at least.
    """

    def __init__(
        self,
        patience_s: float,
        monotonic: Callable[[], float],
        scoring_s: float = 0.0,
        link_bytes_per_s: float = math.inf,
    ) -> None:
        self._scoring_s, self._link_bytes_per_s = scoring_s, link_bytes_per_s
        self._patience_s, self._now_s = patience_s, ActiveClock(min(LONGEST_PAUSE_S, patience_s / 4), monotonic)
        self._since_s: dict[str, float] = {}  # the last progress of every worker that is ready
        self._started_s: dict[str, float] = {}  # of workers that are loading
        self._last_loss_s = -math.inf  # when a worker was lost
        self._longest_s: dict[type[Job], float] = {}
        self._have_weights: set[str] = set()

    @property
    def start_limit_s(self) -> float:
        """How long a worker may take to load."""
        return UNTIMED_FACTOR * self._patience_s

    def start(self, worker: str) -> None:
        """The worker is started, and will be ready once it has loaded everything."""
        self._started_s[owner(worker)] = self._now_s()

    def loading(self) -> tuple[str, float] | None:
        """The worker that has been loading for longest, and for how many seconds."""
        if not self._started_s:
            return None
        worker = min(self._started_s, key=lambda each: self._started_s[each])
        return worker, self._now_s() - self._started_s[worker]

    def begin(self, worker: str) -> None:
        """The worker is ready, or begins a job after it was idle."""
        self._started_s.pop(owner(worker), None)
        self._since_s[owner(worker)] = self._now_s()

    def is_ready(self, worker: str) -> bool:
        """Whether the worker has begun to carry out jobs."""
        return owner(worker) in self._since_s

    def finish(self, worker: str, job: Job) -> None:
        """The result of a job has arrived; the worker begins its next one."""
        now_s = self._now_s()
        took_s = now_s - self._since_s.get(owner(worker), now_s)
        self._longest_s[type(job)] = max(took_s, self._longest_s.get(type(job), 0.0))
        if isinstance(job, Publish):
            self._have_weights.add(owner(worker))
        self.begin(worker)

    def forget(self, worker: str) -> None:
        """The worker is lost. Others may have waited for it: their time starts again, if their jobs may wait."""
        self._since_s.pop(owner(worker), None)
        self._started_s.pop(owner(worker), None)
        self._have_weights.discard(owner(worker))
        self._last_loss_s = self._now_s()

    def any_silent(self) -> bool:
        """Whether a worker has made no progress for so long that its job may be overdue."""
        now_s = self._now_s()
        return any(now_s - since_s > self._patience_s for since_s in self._since_s.values())

    def overdue(self, jobs: Mapping[str, Iterable[Job]]) -> OverdueJob | None:
        """The first worker whose oldest job is overdue, given the unfinished jobs of each in order."""
        now_s = self._now_s()
        pending: dict[str, list[Job]] = {}
        for worker, held in jobs.items():
            pending.setdefault(owner(worker), []).extend(held)
        for worker, held_jobs in pending.items():
            since_s = self._since_s.get(worker, now_s)
            if held_jobs and not isinstance(held_jobs[0], INDEPENDENT):
                since_s = max(since_s, self._last_loss_s)
            waited_s = now_s - since_s
            if held_jobs and waited_s > max(self.allowed_s(job, worker) for job in held_jobs):
                return OverdueJob(worker, held_jobs[0], waited_s)
        return None

    def allowed_s(self, job: Job, worker: str = "") -> float:
        """The longest time without a result while this worker has the job."""
        kind = type(job)
        least_s = self._patience_s + (self._scoring_s if kind in SCORING else 0.0)
        if isinstance(job, Publish) and owner(worker) not in self._have_weights:
            least_s = max(UNTIMED_FACTOR * self._patience_s, job.weights.bytes / self._link_bytes_per_s)
        if kind not in self._longest_s:
            return max(least_s, UNTIMED_FACTOR * self._patience_s)
        longest_s = self._longest_s[kind] if kind in INDEPENDENT else max(self._longest_s.values())
        return max(least_s, FACTOR * longest_s)


def owner(worker: str) -> str:
    """The worker that a rank belongs to, as `trainer` for `trainer/1`."""
    return worker.partition("/")[0]
