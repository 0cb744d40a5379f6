"""Checksums of large files and tensors, piece by piece and by all cores at once: one core would take minutes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

PIECE_BYTES = 16 * 2**20
THREADS = min(16, os.cpu_count() or 1)

T = TypeVar("T")


def file_checksum(path: Path, threads: int = THREADS) -> str:
    """Of what is in the file; the same whatever the number of threads."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        starts = range(0, os.fstat(descriptor).st_size, PIECE_BYTES)
        return _checksum(lambda start: os.pread(descriptor, PIECE_BYTES, start), starts, threads)
    finally:
        os.close(descriptor)


def tensors_checksum(tensors: Mapping[str, Tensor], threads: int = THREADS) -> str:
    """Of names, types, shapes and values of tensors on the CPU."""
    return _checksum(lambda piece: piece, _pieces_of(tensors), threads)


def _pieces_of(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    for name in sorted(tensors):
        value = tensors[name].detach().contiguous()
        yield f"{name} {value.dtype} {tuple(value.shape)};".encode()
        content = value.reshape(-1).view(torch.uint8).numpy().data
        yield from (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))


def _checksum(read: Callable[[T], bytes | memoryview], pieces: Iterable[T], threads: int) -> str:
    """Of the pieces' own ones, in their order. A thread that hashes lets the others work."""
    whole = blake2b(digest_size=16)
    with ThreadPoolExecutor(threads) as pool:
        for digest in pool.map(lambda piece: blake2b(read(piece)).digest(), pieces):
            whole.update(digest)
    return whole.hexdigest()
