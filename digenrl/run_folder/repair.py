"""Mends JSON-lines files that were cut or damaged, so that a run can resume from a whole checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.run_folder.lines import JsonLine, read_line

CHECKED_BYTES = 64 << 20  # larger files are only checked where they will be truncated


def repair_lines(
    path: Path, position: int, read: Callable[[JsonLine], object] = lambda line: None
) -> tuple[int, str | None]:
    """Keeps the good lines before `position`, in bytes, if the file is damaged there.

    A line is good if it is a JSON object for which `read` does not raise ConfigError.
    Returns the position after them, and a line for the user if anything was wrong. The damaged file is kept beside
    the repaired one.
    """
    content = _first_bytes(path, position) if path.is_file() else b""
    cut = len(content) < position or (position > 0 and not content.endswith(b"\n"))
    if not cut and (position > CHECKED_BYTES or all(_is_good(line, path, read) for line in content.splitlines())):
        return position, None
    complete = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    good = [line for line in complete if _is_good(line, path, read)]
    repaired = path.with_name(f".repaired-{path.name}")
    with repaired.open("wb") as file:
        file.writelines(good)
        file.flush()
        os.fsync(file.fileno())
    aside = _set_aside(path)
    repaired.rename(path)
    if aside is None:
        return 0, f"{path}: was missing; its lines are lost"
    kept = f"kept {len(good)} good line{'' if len(good) == 1 else 's'}"
    return path.stat().st_size, f"{path}: was cut or damaged; {kept}, the damaged file is {aside.name}"


def _first_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def _is_good(line: bytes, path: Path, read: Callable[[JsonLine], object]) -> bool:
    try:
        read(read_line(line, path))
        return True
    except ConfigError:
        return False


def _set_aside(path: Path) -> Path | None:
    """Renames the file to the first free name; None if it does not exist."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return path.rename(aside)
