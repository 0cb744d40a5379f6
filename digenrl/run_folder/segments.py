"""Finished parts of a growing file: set aside, compressed, and read as if they were still in it.

A part is named after the file and the bytes that it holds, as `journal.jsonl.0-67108864.gz`. It is renamed first
and compressed afterwards, so that a crash at any moment loses nothing and doubles nothing.
"""

from __future__ import annotations

import gzip
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
_BYTES = re.compile(r"\.(\d+)-(\d+)(\.gz)?")


@dataclass(frozen=True, slots=True)
class Segment:
    """The bytes from `start` to `end` of a file, in a file of their own."""

    path: Path
    start: int
    end: int

    @property
    def compressed(self) -> bool:
        return self.path.suffix == ".gz"

    def open(self) -> IO[bytes]:
        """Opens the part for reading, even if it was compressed just now."""
        if not self.compressed:
            with suppress(FileNotFoundError):
                return self.path.open("rb")
        packed = self.path if self.compressed else self.path.with_name(f"{self.path.name}.gz")
        return gzip.open(packed, "rb")  # type: ignore[return-value]


def segments_of(path: Path) -> list[Segment]:
    """The finished parts of a file, in order. Of a part that is in both forms, the uncompressed one counts."""
    found: dict[int, Segment] = {}
    for each in path.parent.glob(f"{path.name}.*"):
        match = _BYTES.fullmatch(each.name.removeprefix(path.name))
        if match is not None:
            segment = Segment(each, int(match[1]), int(match[2]))
            if segment.start not in found or not segment.compressed:
                found[segment.start] = segment
    return [found[start] for start in sorted(found)]


def live_start(path: Path) -> int:
    """How many bytes are in finished parts, before those in the file itself."""
    return max((segment.end for segment in segments_of(path)), default=0)


def set_aside(path: Path) -> None:
    """Makes everything that is in the file a finished part. The file no longer exists."""
    start = live_start(path)
    path.rename(path.with_name(f"{path.name}.{start}-{start + path.stat().st_size}"))


def compress_segments(path: Path) -> None:
    """Compresses all finished parts of a file that are not compressed yet."""
    for segment in segments_of(path):
        if segment.compressed:
            continue
        compress(segment.path, segment.path.with_name(f"{segment.path.name}.gz"))
        segment.path.unlink()


def compress(path: Path, packed: Path) -> None:
    """Writes a compressed copy of a file to disk, completely or not at all."""
    partial = packed.with_name(packed.name + PARTIAL)
    try:
        with path.open("rb") as source, gzip.open(partial, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(packed)
    finally:
        partial.unlink(missing_ok=True)


def in_background(compress_files: Callable[[Path], None], path: Path) -> threading.Thread:
    """Compresses files in a thread. If that fails, as on a full disk, they stay as they are, which is logged."""

    def run() -> None:
        try:
            compress_files(path)
        except OSError as error:
            logger.warning("%s: could not be compressed: %s", path, error.strerror or error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def unpack_to(path: Path, position: int) -> None:
    """Undoes what was set aside after `position`: the part that holds it becomes the file again."""
    for segment in reversed(segments_of(path)):
        if segment.end <= position:
            return
        plain = segment.path.with_name(segment.path.name.removesuffix(".gz"))
        if segment.compressed:
            partial = plain.with_name(plain.name + PARTIAL)
            with segment.open() as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            partial.rename(plain)
        plain.with_name(f"{plain.name}.gz").unlink(missing_ok=True)
        plain.rename(path)  # only now is what followed it gone


def all_parts(path: Path, first_byte: int = 0) -> Iterator[tuple[int, IO[bytes]]]:
    """Every part of a file with the byte where it starts, open for reading; the file itself is the last.

    Parts that end before `first_byte` are left out. The file may be set aside meanwhile.
    """
    with ExitStack() as stack:
        live, segments = _open(path, stack), segments_of(path)
        while not _is_open(path, live):  # it was set aside: before its parts were listed, or after
            live, segments = _open(path, stack), segments_of(path)
        for segment in segments:
            if segment.end > first_byte:
                with segment.open() as file:
                    yield segment.start, file
        if live is not None:
            yield segments[-1].end if segments else 0, live


def _open(path: Path, stack: ExitStack) -> IO[bytes] | None:
    with suppress(FileNotFoundError):
        return stack.enter_context(path.open("rb"))
    return None


def _is_open(path: Path, file: IO[bytes] | None) -> bool:
    """Whether this is the file at the path; None stands for no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return file is None
    return file is not None and os.path.samestat(found, os.fstat(file.fileno()))
