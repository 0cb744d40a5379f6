"""The folder in which workers of one machine exchange tensors, as the driver sees it: names and sizes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from digenrl.host_memory import free_host_bytes
from digenrl.records import WeightsReference

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "digenrl-"
SUFFIX = ".safetensors"
LOCK = "lock"


def check_weights(reference: WeightsReference, found_bytes: int, found_checksum: int) -> None:
    """Raises ValueError if the weights that were found do not match their reference."""
    if (found_bytes, found_checksum) != (reference.bytes, reference.checksum):
        raise ValueError(
            f"{reference.name}: arrived damaged, {found_bytes} bytes with checksum {found_checksum}; "
            f"expected {reference}"
        )


class ExchangeFolder:
    """The exchange folder of one run. Removing it frees all tensors in it.

    The process that creates it holds a lock on it until that process ends. A folder without a lock belongs to a
    run whose processes were all killed, and is removed by the next run.
    """

    holds_weights = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: int | None = None

    @classmethod
    def create(cls, bytes_wanted: int = 256 << 20, places: Iterable[Path] | None = None) -> ExchangeFolder:
        """A new folder in shared memory or, if that has less free space than wanted, in the temporary folder.

        Containers often have only 64 MB of shared memory. Files elsewhere are still read through the page cache.
        """
        candidates = [SHARED_MEMORY] if places is None else list(places)
        usable = [place for place in candidates if place.is_dir() and os.access(place, os.W_OK)]
        fallback = Path(tempfile.gettempdir())
        for place in {*usable, fallback}:
            remove_abandoned(place)
        large_enough = [place for place in usable if shutil.disk_usage(place).free >= bytes_wanted]
        # Hidden until it is locked, so that no other run takes it for abandoned.
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=large_enough[0] if large_enough else fallback))
        lock = os.open(hidden / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = cls(hidden.rename(hidden.with_name(hidden.name.removeprefix("."))))
        folder._lock = lock
        return folder

    def free_bytes(self) -> int:
        """Free space; for a folder in shared memory at most the free memory of the machine."""
        on_disk, in_memory = shutil.disk_usage(self.root).free, free_host_bytes()
        return on_disk if in_memory is None or SHARED_MEMORY not in self.root.parents else min(on_disk, in_memory)

    def where(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path:
        assert "/" not in name, f"a name, not a path: {name}"
        return self.root / f"{name}{SUFFIX}"

    def drop(self, name: str) -> None:
        """Removes a name. Tensors that are still mapped stay valid. Does nothing if the name is unknown."""
        self.path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return sorted(path.name.removesuffix(SUFFIX) for path in self.root.glob(f"*{SUFFIX}"))

    def remove(self) -> None:
        """Removes the folder. Safe to call twice, from several processes, and while a worker writes into it."""
        removed = self.root.with_name(f"{self.root.name}.gone")
        with suppress(OSError):  # another process was faster
            self.root.rename(removed)  # a worker that still writes finds no folder, and leaves nothing behind
        shutil.rmtree(removed, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(place: Path) -> None:
    """Removes exchange folders whose creator has ended. Folders of other users are not touched."""
    for root in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # already removed, still locked by its creator, or not ours
            lock = os.open(root / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root)
            finally:
                os.close(lock)
