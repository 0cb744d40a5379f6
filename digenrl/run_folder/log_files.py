"""Limits the log files of a run's driver and workers: long ones are compressed, and the oldest parts removed."""

from __future__ import annotations

import os
from pathlib import Path

from digenrl.run_folder.segments import compress

LONGEST_BYTES = 32 << 20
KEPT_PARTS = 4  # compressed, beside the file that grows


def rotate_logs(folder: Path, limit: int = LONGEST_BYTES) -> None:
    """Compresses every log file above the limit to NAME.log.1.gz, after renaming older parts to .2.gz and so on.

    Its processes have the file open for appending, so it is emptied and not replaced. Lines that are written while
    it is copied may be lost.
    """
    for log in sorted(folder.glob("*.log")):
        if log.stat().st_size < limit:
            continue
        compress(log, _part(log, 0))
        os.truncate(log, 0)
        for number in range(KEPT_PARTS - 1, -1, -1):
            part = _part(log, number)
            if part.exists():
                part.replace(_part(log, number + 1))


def _part(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}.gz")
