"""What this machine, or the container that a process is in, can still give of its memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MACHINE = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")  # where it is of the second version; of the first, the machine's counts


def free_host_bytes() -> int | None:
    """Caches of files count as free; None where the system does not tell."""
    free = [each for each in (_of_machine(), _of_container()) if each is not None]
    return min(free, default=None)


def _of_machine() -> int | None:
    with suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in MACHINE.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return None


def _of_container() -> int | None:
    with suppress(OSError, ValueError, KeyError):
        limit = int((CONTAINER / "memory.max").read_text())  # "max" where there is none
        statistics = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        used = int((CONTAINER / "memory.current").read_text()) - int(statistics["inactive_file"])
        return max(0, limit - used)
    return None
