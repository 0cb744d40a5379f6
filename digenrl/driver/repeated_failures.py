"""Reports failed jobs at once, and finds workers and runs in which everything fails. Needs no torch."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable

from digenrl.logs import describe
from digenrl.loop import RunGaveUpError
from digenrl.records import Evaluated, Generated, JobFailed, Quarantine, Result, Scored

logger = logging.getLogger(__name__)

LIMIT = 5  # groups in a row with the same error
WORKER_LIMIT = 4  # jobs in a row: a slice that fails everywhere is tried three times, possibly by one worker
# What may differ between samples: quoted texts, addresses of objects, and numbers.
_OWN_PARTS = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|\d+|\s+")


class RepeatedFailures:
    """Counts failed jobs and quarantined groups. Any score in between shows that not everything fails."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._failed_jobs = self._in_a_row = 0
        self._last_error = ""
        self._of_worker: Counter[str] = Counter()  # failed jobs in a row

    def observe(self, worker: str, result: Result) -> None:
        """A worker's result. A job that failed is one that the scheduler tries again or replaces."""
        if isinstance(result, JobFailed):
            self._failed(result)
            self._of_worker[worker] += 1
        elif isinstance(result, Generated | Evaluated | Scored):
            self.replaced(worker)
            if isinstance(result, Scored) or (isinstance(result, Generated) and result.scores is not None):
                self._in_a_row, self._last_error = 0, ""

    def _failed(self, failure: JobFailed) -> None:
        self._failed_jobs += 1
        message = f"{describe(failure.job)} failed ({self._failed_jobs} so far): {failure.reason}"
        logger.warning("%s", message)
        self._notify(message)

    def quarantined(self, action: Quarantine) -> None:
        """A group failed. Raises RunGaveUpError if it is one of several in a row with the same error."""
        error = _OWN_PARTS.sub("#", action.reason)
        self._in_a_row = self._in_a_row + 1 if error == self._last_error else 1
        self._last_error = error
        if self._in_a_row >= LIMIT:
            raise RunGaveUpError(f"{LIMIT} groups in a row failed with the same error: {action.reason}")

    def replaced(self, worker: str) -> None:
        """A new process takes the worker's place."""
        del self._of_worker[worker]

    def fails_always(self, worker: str) -> bool:
        """Whether a worker has failed so many jobs in a row that it is probably the cause."""
        return self._of_worker[worker] >= WORKER_LIMIT
