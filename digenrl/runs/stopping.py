"""How a run ends early: by a failure, or by Ctrl-C and SIGTERM, which stop it after saving."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunFailedError(RuntimeError):
    """A run cannot continue; the message says why, and what is saved."""


class StopRun(BaseException):
    """A signal asked the run to stop before it began."""


class Stopper:
    """Remembers the first signal. A second signal raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def take_request(self) -> str | None:
        """The signal that asked the run to stop; None after the first call."""
        name, self.signal_name = self.signal_name, None
        return name

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the first signal is remembered instead of ending the process."""
        before = {each: signal.signal(each, self._remember) for each in SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        for each in SIGNALS:
            signal.signal(each, signal.default_int_handler)
