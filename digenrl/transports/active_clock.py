"""A clock for how long workers may be silent, which leaves out the time in which the driver itself is paused."""

from __future__ import annotations

import time
from collections.abc import Callable


class ActiveClock:
    """Seconds in which the driver was active.

    It is read often. What exceeds `longest_pause_s` between two readings is a pause of the driver, as after
    Ctrl-Z, and mostly of its workers too.
    """

    def __init__(self, longest_pause_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._longest_pause_s, self._monotonic = longest_pause_s, monotonic
        self._read_s, self._active_s = monotonic(), 0.0

    def __call__(self) -> float:
        now_s = self._monotonic()
        self._active_s += min(now_s - self._read_s, self._longest_pause_s)
        self._read_s = now_s
        return self._active_s
