"""The free memory of this machine, or of the container that the process runs in."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # version 2; with version 1 only the machine's memory is known


def free_host_bytes() -> int | None:
    """Free memory, including file caches; None if the system does not report it."""
    free = [each for each in (_machine_bytes(), _container_bytes()) if each is not None]
    return min(free, default=None)


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
