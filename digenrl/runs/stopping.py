"""How a run ends early: by a failure, or by Ctrl-C, SIGTERM and SIGHUP, which stop it after saving."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEATED_S = 1.0  # `timeout` and batch systems signal both a process and its group


class RunFailedError(RuntimeError):
    """A run cannot continue; the message says why, and what is saved."""


class StopRun(BaseException):
    """A signal asked the run to stop before it began."""


class Stopper:
    """Remembers the first signal. A second Ctrl-C or SIGTERM, `REPEATED_S` later, raises KeyboardInterrupt."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.signal_name: str | None = None
        self._now = now
        self._asked_s = now()
        self._heard: list[signal.Signals] = []
        self._terminals: list[int] = []  # descriptors; a closed terminal is not recognized any more

    def take_request(self) -> str | None:
        """The signal that asked the run to stop; None after the first call."""
        name, self.signal_name = self.signal_name, None
        return name

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the first signal is remembered instead of ending the process."""
        # What the caller ignores stays ignored: `nohup` starts programs without SIGHUP.
        self._heard = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        streams = [stream for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]
        self._terminals = [stream.fileno() for stream in streams if not stream.closed and stream.isatty()]
        before = {each: signal.signal(each, self._remember) for each in self._heard}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self._asked_s = self._now()
        for each in self._heard:
            # A terminal may be closed while the run is being saved.
            signal.signal(each, self._leave_terminal if each == signal.SIGHUP else self._leave_at_once)
        if number == signal.SIGHUP:
            self._leave_terminal(number, frame)

    def _leave_at_once(self, number: int, frame: FrameType | None) -> None:
        if self._now() - self._asked_s >= REPEATED_S:
            raise KeyboardInterrupt

    def _leave_terminal(self, number: int, frame: FrameType | None) -> None:
        """Discards all further output to a terminal, which is closed: writing to it would fail."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
