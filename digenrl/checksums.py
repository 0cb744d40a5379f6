"""Checksums of large files and tensors, computed piece by piece on all cores: a single one would take minutes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

PIECE_BYTES = 16 * 2**20
THREADS = min(16, os.cpu_count() or 1)

T = TypeVar("T")
Piece = bytes | memoryview


def file_checksum(path: Path, threads: int = THREADS) -> str:
    """A checksum of the file's content; does not depend on the number of threads."""
    with _pieces_in(path) as (read, starts):
        return _checksum(read, starts, threads)


def quick_file_checksum(path: Path, threads: int = THREADS) -> int:
    """A checksum from CRC-32 of pieces: several times faster, for files in memory that are soon read again."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = memoryview(mmap(file.fileno(), size, access=ACCESS_READ) if size else b"")
    return int(_checksum(lambda piece: piece, _cut(content), threads, _crc32), 16)


def tensors_checksum(tensors: Mapping[str, Tensor], threads: int = THREADS) -> str:
    """A checksum of the names, dtypes, shapes and values of tensors on the CPU."""
    return _checksum(lambda piece: piece, _pieces_of(tensors), threads)


@contextmanager
def _pieces_in(path: Path) -> Iterator[tuple[Callable[[int], bytes], range]]:
    """Yields a function that reads a piece of a file, and the offsets of the pieces."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        starts = range(0, os.fstat(descriptor).st_size, PIECE_BYTES)
        yield lambda start: os.pread(descriptor, PIECE_BYTES, start), starts
    finally:
        os.close(descriptor)


def _pieces_of(tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    import torch  # the driver computes checksums of files without it

    for name in sorted(tensors):
        value = tensors[name].detach().contiguous()
        yield f"{name} {value.dtype} {tuple(value.shape)};".encode()
        content = value.reshape(-1).view(torch.uint8).numpy().data
        yield from _cut(content)


def _cut(content: memoryview) -> Iterator[memoryview]:
    return (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))


def _crc32(piece: Piece) -> bytes:
    return zlib.crc32(piece).to_bytes(4, "little")


def _blake2b(piece: Piece) -> bytes:
    return blake2b(piece).digest()


def _checksum(
    read: Callable[[T], Piece], pieces: Iterable[T], threads: int, digest: Callable[[Piece], bytes] = _blake2b
) -> str:
    """A digest of the digests of all pieces, in order. Hashing releases the GIL."""
    whole = blake2b(digest_size=16)
    with ThreadPoolExecutor(threads) as pool:
        for each in pool.map(lambda piece: digest(read(piece)), pieces):
            whole.update(each)
    return whole.hexdigest()
