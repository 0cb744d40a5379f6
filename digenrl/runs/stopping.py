"""Ctrl-C and SIGTERM: the first asks the run to save and leave, the second ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRun(BaseException):
    """Somebody wants the run to save and leave."""


class Stopper:
    """Remembers the request; `check` raises it where the run can be left in order."""

    def __init__(self) -> None:
        self.asked_by: str | None = None

    def take_request(self) -> str | None:
        """The signal that asked the run to stop, once."""
        asked_by, self.asked_by = self.asked_by, None
        return asked_by

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked_by = signal.Signals(number).name
        for each in SIGNALS:
            signal.signal(each, signal.default_int_handler)  # the next one is meant

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the signals are noted instead of ending the process."""
        before = {each: signal.signal(each, self._note) for each in SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
