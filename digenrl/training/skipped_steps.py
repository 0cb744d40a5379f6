"""Counts steps with updates that were skipped because their gradient was not finite."""

from __future__ import annotations


class SkippedSteps:
    """Allows up to `limit` such steps in a row."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last_step, self._in_a_row = -1, 0

    def skip(self, step: int, why: str) -> None:
        """An update of this step is skipped. Raises FloatingPointError if there are too many steps in a row."""
        if step != self._last_step:
            self._in_a_row = self._in_a_row + 1 if step == self._last_step + 1 and self._in_a_row else 1
            self._last_step = step
        if self._in_a_row > self._limit:
            times = f"{self._in_a_row} steps in a row: " if self._limit else ""
            raise FloatingPointError(f"{times}{why}")
