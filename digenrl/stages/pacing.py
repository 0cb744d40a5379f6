"""Emulates a slow link: delays what is sent to a rate, as a token bucket does."""

from __future__ import annotations

import time
from collections.abc import Callable

BURST_S = 0.005  # how much of its rate a link that was idle may send at once


class PacedLink:
    """Lets bytes pass at a rate. `clock` and `sleep` are for tests."""

    def __init__(
        self,
        bytes_per_s: float,
        burst_bytes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"the rate of a link must be positive, got {bytes_per_s:g} bytes per second")
        self.bytes_per_s = bytes_per_s
        self._burst_s = BURST_S if burst_bytes is None else burst_bytes / bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()

    def pass_through(self, count: int) -> None:
        """Returns when this many bytes have passed the link."""
        now = self._clock()
        self._free_at = max(self._free_at, now - self._burst_s) + count / self.bytes_per_s
        if self._free_at > now:
            self._sleep(self._free_at - now)
