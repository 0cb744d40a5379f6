"""The host memory of this machine, or of the container that the process runs in: how much is free, and whose turn
it is to load a model through it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # version 2; with version 1 only the machine's memory is known


def free_host_bytes() -> int | None:
    """Free memory, including file caches; None if the system does not report it."""
    free = [each for each in (_machine_bytes(), _container_bytes()) if each is not None]
    return min(free, default=None)


def physical_bytes() -> int:
    """All memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def total_host_bytes() -> int:
    """All memory of the machine, or of the container if that is less."""
    with suppress(OSError, ValueError):  # "max" if there is no limit
        return min(physical_bytes(), int((CGROUP / "memory.max").read_text()))
    return physical_bytes()


def _machine_bytes() -> int | None:
    with suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return None


def _container_bytes() -> int | None:
    with suppress(OSError, ValueError, KeyError):
        limit = int((CGROUP / "memory.max").read_text())  # "max" if there is no limit
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(statistics["inactive_file"])
        return max(0, limit - used)
    return None


@contextmanager
def loading_in_turn(device: str) -> Iterator[None]:
    """Inside, no other process of this user on this machine loads a model to a GPU.

    A model passes through host memory on its way to a GPU. Eight workers that load at once need eight copies
    there, one after the other a single one. The lock ends with its process. Nothing is locked for a CPU.
    """
    if not device.startswith("cuda"):
        yield
        return
    import fcntl  # only on systems that have GPUs for training

    # The number of the user, who has no name in many containers. Another user's file or link is not opened.
    path = Path(tempfile.gettempdir()) / f"digenrl-{os.getuid()}.loading"
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
