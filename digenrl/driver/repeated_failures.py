"""Reports failed jobs at once, and ends a run in which every group fails for the same reason. Needs no torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from digenrl.logs import describe
from digenrl.loop import RunGaveUpError
from digenrl.records import JobFailed, Quarantine

logger = logging.getLogger(__name__)

LIMIT = 5  # groups in a row with the same error
# What may differ between samples: quoted texts, addresses of objects, and numbers.
_OWN_PARTS = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|\d+|\s+")


class RepeatedFailures:
    """Counts failed jobs and quarantined groups. Any score in between shows that not everything fails."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._failed_jobs = self._in_a_row = 0
        self._last_error = ""

    def failed(self, failure: JobFailed) -> None:
        """A job failed that the scheduler tries again or replaces."""
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

    def scored(self) -> None:
        """A sample has its score."""
        self._in_a_row, self._last_error = 0, ""
