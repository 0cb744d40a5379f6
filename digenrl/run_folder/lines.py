"""JSON lines that only grow: one object per line, written through at once, and cut back when a run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from digenrl.config.reading import ConfigError

_BLOCK_BYTES = 1 << 16


class JsonLines:
    """One such file, open for appending. Half a line that a crash left at the end is dropped when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
        _drop_torn_line(path)

    def append(self, content: Mapping[str, Any]) -> None:
        """One line. NaN and infinities are no JSON: ValueError, and nothing is written."""
        line = json.dumps(content, allow_nan=False, separators=(",", ":"))
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def position(self) -> int:
        """How many bytes there are: what a checkpoint remembers."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Brings everything to the disk."""
        os.fsync(self._file.fileno())

    def truncate(self, position: int) -> None:
        """Forgets everything behind a position that `position` gave."""
        size = os.fstat(self._file.fileno()).st_size
        if position > size:
            raise ConfigError(
                f"{self.path}: has {size} bytes where its checkpoint remembers {position}; "
                f"the file was cut or replaced, restore it or resume from an older checkpoint"
            )
        if not _ends_a_line(self.path, position):
            raise ConfigError(
                f"{self.path}: no line ends at byte {position}, where its checkpoint says one does; "
                f"the file was changed, restore it or resume from an older checkpoint"
            )
        os.ftruncate(self._file.fileno(), position)

    def close(self) -> None:
        """May be called twice."""
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line, one at a time; half a line at the end, as a crash or a running writer leaves, is left out.

    A damaged line in between raises ConfigError with its number.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                content = json.loads(line)
            except ValueError:
                raise ConfigError(f"{path}: line {number} is not valid JSON; the file is damaged") from None
            if not isinstance(content, dict):
                raise ConfigError(f"{path}: line {number} is not a JSON object; the file is damaged")
            yield content


def _drop_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        start = end
        while start:
            start = max(0, start - _BLOCK_BYTES)
            file.seek(start)
            newline = file.read(min(_BLOCK_BYTES, end - start)).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
        file.truncate(0)


def _ends_a_line(path: Path, position: int) -> bool:
    if position == 0:
        return True
    with path.open("rb") as file:
        file.seek(position - 1)
        return file.read(1) == b"\n"
