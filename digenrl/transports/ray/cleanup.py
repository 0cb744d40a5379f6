"""Ends what a driver started and left behind, however it ended. A script of its own: python keeper.py FOLDER PID.

It waits for the end of its standard input, which the driver holds open for as long as it lives. Then it ends
every process that still writes into the folder of the driver's cluster, and removes the folder.
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

PATIENCE_S = 10.0
PAUSE_S = 0.1
WRITES = 0o200  # the link of an open file is writable where the file was opened for writing


def writers(folder: Path, but: int) -> Iterator[int]:
    """Processes with a file of this folder open for writing."""
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) not in (but, os.getpid()) and _writes(process, folder):
            yield int(process.name)


def _writes(process: Path, folder: Path) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:  # it has ended, or is another user's
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if descriptor.readlink().is_relative_to(folder) and descriptor.lstat().st_mode & WRITES:
                return True
    return False


def clear(folder: Path, driver: int) -> None:
    """Ends the writers of a folder, also those that appear meanwhile, and removes it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := list(writers(folder, driver))) and time.monotonic() < deadline_s:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    clear(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
