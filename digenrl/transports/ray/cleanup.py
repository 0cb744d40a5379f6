"""Ends the processes of a cluster whose driver is gone. Run as a script: python cleanup.py FOLDER DRIVER_PID.

It waits for the end of its standard input, which the driver keeps open until it ends. Then it kills every process
that still writes into the cluster's folder, and removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

KILL_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.1
OWNER_CAN_WRITE = 0o200  # mode of the link in /proc for a file that was opened for writing


def writers(folder: Path, driver: int) -> Iterator[int]:
    """Processes other than the driver and this one that have a file of the folder open for writing."""
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) not in (driver, os.getpid()) and _writes(process, folder):
            yield int(process.name)


def _writes(process: Path, folder: Path) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if descriptor.readlink().is_relative_to(folder) and descriptor.lstat().st_mode & OWNER_CAN_WRITE:
                return True
    return False


def remove(folder: Path, driver: int) -> None:
    """Kills the writers of a folder, including those that start in the meantime, and removes the folder."""
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while (found := list(writers(folder, driver))) and time.monotonic() < deadline_s:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
