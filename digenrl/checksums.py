"""Checksums of large files and tensors, piece by piece and by all cores at once: one core would take minutes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

PIECE_BYTES = 16 * 2**20
THREADS = min(16, os.cpu_count() or 1)

T = TypeVar("T")
Piece = bytes | memoryview


def file_checksum(path: Path, threads: int = THREADS) -> str:
    """Of what is in the file; the same whatever the number of threads."""
    with _pieces_in(path) as (read, starts):
        return _checksum(read, starts, threads)


def quick_file_checksum(path: Path, threads: int = THREADS) -> int:
    """By the CRC-32 of pieces: several times as quick, for what lies in memory and is read again soon."""
    with _pieces_in(path) as (read, starts):
        return int(_checksum(read, starts, threads, lambda piece: zlib.crc32(piece).to_bytes(4, "little")), 16)


def tensors_checksum(tensors: Mapping[str, Tensor], threads: int = THREADS) -> str:
    """Of names, types, shapes and values of tensors on the CPU."""
    return _checksum(lambda piece: piece, _pieces_of(tensors), threads)


@contextmanager
def _pieces_in(path: Path) -> Iterator[tuple[Callable[[int], bytes], range]]:
    """How to read a piece of a file, and where pieces start."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        starts = range(0, os.fstat(descriptor).st_size, PIECE_BYTES)
        yield lambda start: os.pread(descriptor, PIECE_BYTES, start), starts
    finally:
        os.close(descriptor)


def _pieces_of(tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    for name in sorted(tensors):
        value = tensors[name].detach().contiguous()
        yield f"{name} {value.dtype} {tuple(value.shape)};".encode()
        content = value.reshape(-1).view(torch.uint8).numpy().data
        yield from (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))


def _blake2b(piece: Piece) -> bytes:
    return blake2b(piece).digest()


def _checksum(
    read: Callable[[T], Piece], pieces: Iterable[T], threads: int, digest: Callable[[Piece], bytes] = _blake2b
) -> str:
    """Of the pieces' own ones, in their order. A thread that hashes lets the others work."""
    whole = blake2b(digest_size=16)
    with ThreadPoolExecutor(threads) as pool:
        for each in pool.map(lambda piece: digest(read(piece)), pieces):
            whole.update(each)
    return whole.hexdigest()
