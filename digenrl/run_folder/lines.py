"""Append-only JSON-lines files: one object per line, flushed at once, truncated when a run resumes.

A last line without its newline is incomplete, as a crash or a running writer leaves it: readers ignore it, and
opening the file for appending removes it. Parts of a long file are set aside and compressed; see `segments`.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.config.reading import ConfigError
from digenrl.run_folder.segments import (
    all_parts,
    compress_segments,
    in_background,
    live_start,
    set_aside,
    unpack_to,
)

_BLOCK_BYTES = 1 << 16
ROTATED_BYTES = 64 << 20  # a file of this size is set aside when the run is saved


@dataclass(frozen=True, slots=True)
class JsonLine:
    """The content of one line, and where it is in the file."""

    path: Path
    number: int
    start: int  # in bytes
    end: int
    content: dict[str, Any]

    def error(self, problem: str) -> ConfigError:
        """An error that names the file and the line."""
        return ConfigError(f"{self.path}, line {self.number}: {problem}")


class JsonLines:
    """A JSON-lines file that is open for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()
        _remove_incomplete_line(path)

    def _open(self) -> None:
        self._start = live_start(self.path)
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {error.strerror or error}") from None

    def append(self, content: Mapping[str, Any]) -> None:
        """Writes one line. NaN and infinities are not JSON: they raise ValueError, and nothing is written."""
        line = json.dumps(content, allow_nan=False, separators=(",", ":"))
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def position(self) -> int:
        """The size of all parts in bytes, which a checkpoint stores."""
        return self._start + os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Forces all lines to disk."""
        os.fsync(self._file.fileno())

    def rotate(self, limit: int = ROTATED_BYTES) -> threading.Thread | None:
        """Sets a file of at least `limit` bytes aside and compresses it in the returned thread."""
        if self.position() - self._start < limit:
            return None
        self._file.close()
        set_aside(self.path)
        self._open()
        return in_background(compress_segments, self.path)

    def truncate(self, position: int) -> None:
        """Removes everything after a position that `position` returned earlier."""
        if position < self._start:
            self._file.close()
            unpack_to(self.path, position)
            self._open()
        size = self.position()
        if position > size:
            raise ConfigError(
                f"{self.path}: has {size} bytes, its checkpoint expects at least {position}; "
                f"the file was cut or replaced, restore it or resume from an older checkpoint"
            )
        if not _ends_a_line(self.path, position - self._start):
            raise ConfigError(
                f"{self.path}: no line ends at byte {position}, as its checkpoint expects; "
                f"the file was changed, restore it or resume from an older checkpoint"
            )
        os.ftruncate(self._file.fileno(), position - self._start)

    def close(self) -> None:
        """Closes the file; may be called twice."""
        self._file.close()


def located_lines(path: Path, first_byte: int = 0) -> Iterator[JsonLine]:
    """Every complete line, in order; none if the file does not exist yet. A damaged line raises ConfigError.

    Lines that start before `first_byte` are left out.
    """
    number = 0
    try:
        for start, file in all_parts(path, first_byte):
            for text in file:
                if not text.endswith(b"\n"):
                    return
                number += 1
                if start >= first_byte:
                    yield read_line(text, path, number, start)
                start += len(text)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}") from None


def read_line(text: bytes, path: Path, number: int = 1, start: int = 0) -> JsonLine:
    """One line of a file; raises ConfigError if it is not a JSON object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        shown = text.rstrip(b"\n").decode("utf-8", errors="replace")
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ConfigError(f"{path}, line {number}: not a JSON object: {shown!r}; the file is damaged")
    return JsonLine(path, number, start, start + len(text), content)


def _remove_incomplete_line(path: Path) -> None:
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
