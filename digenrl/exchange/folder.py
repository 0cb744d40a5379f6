"""The folder of an exchange, as the driver sees it: names and sizes, never tensors. Needs no torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from digenrl.host_memory import free_host_bytes

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "digenrl-"
SUFFIX = ".safetensors"
LOCK = "lock"


class ExchangeFolder:
    """One run's folder. Removing it frees everything that was left in it, whoever left it.

    Who created it holds a lock on it for as long as its process lives; a folder without is left over from a run
    whose every process was killed, and the next run removes it.
    """

    holds_weights = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: int | None = None

    @classmethod
    def create(cls, bytes_wanted: int = 256 << 20, places: Iterable[Path] | None = None) -> ExchangeFolder:
        """A new folder in shared memory or, where there is none with so much room, in the temporary folder.

        Containers often have 64 MB of shared memory; a file elsewhere is still read through the page cache.
        """
        candidates = [SHARED_MEMORY] if places is None else list(places)
        usable = [place for place in candidates if place.is_dir() and os.access(place, os.W_OK)]
        elsewhere = Path(tempfile.gettempdir())
        for place in {*usable, elsewhere}:
            remove_abandoned(place)
        roomy = [place for place in usable if shutil.disk_usage(place).free >= bytes_wanted]
        # Hidden until it is locked: another run must not take it for abandoned.
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=roomy[0] if roomy else elsewhere))
        lock = os.open(hidden / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = cls(hidden.rename(hidden.with_name(hidden.name.removeprefix("."))))
        folder._lock = lock
        return folder

    def free_bytes(self) -> int:
        """How much more it can hold: in shared memory no more than the machine has left, whatever that allows."""
        allowed, left = shutil.disk_usage(self.root).free, free_host_bytes()
        return allowed if left is None or SHARED_MEMORY not in self.root.parents else min(allowed, left)

    def where(self) -> str:
        """What it is called, for people."""
        return str(self.root)

    def path(self, name: str) -> Path:
        """The file of this name."""
        assert "/" not in name, f"a name, not a path: {name}"
        return self.root / f"{name}{SUFFIX}"

    def drop(self, name: str) -> None:
        """Forgets a name; who has its tensors mapped keeps them. Dropping what is not there does nothing."""
        self.path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Everything that is there, in order."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self.root.glob(f"*{SUFFIX}"))

    def remove(self) -> None:
        """Frees everything; may be called twice, by several at once, and while somebody still writes into it."""
        gone = self.root.with_name(f"{self.root.name}.gone")
        with suppress(OSError):  # somebody else was quicker
            self.root.rename(gone)  # whoever writes finds no folder any more, and leaves nothing behind
        shutil.rmtree(gone, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(place: Path) -> None:
    """Removes exchange folders whose creator no longer lives; those of other users are not touched."""
    for root in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, held by its creator, or not ours
            lock = os.open(root / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root)
            finally:
                os.close(lock)
