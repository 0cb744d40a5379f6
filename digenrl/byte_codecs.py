"""Lossless coding of numbers that change little: XOR with the old bytes, byte shuffle, compression. Stateless.

Two floats that differ little have equal signs, exponents and leading digits. The XOR of their bytes is zero there,
and shuffling puts the zeros next to each other: the first bytes of all numbers, then the second bytes, and so on.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Content = bytes | memoryview

PIECE_BYTES = 4 << 20
THREADS = min(16, os.cpu_count() or 1)
COMPRESSION_LEVEL = 1
LENGTH_BYTES = 4
SAMPLE_BYTES = 32 << 10
MIN_SAVING = 0.03  # of a sample; less is not worth the time

RAW, ZLIB, ZSTD = b"r", b"z", b"s"


def has_zstd() -> bool:
    """Whether the optional package `zstandard` is installed; zlib, which is slower, is used without it."""
    return find_spec("zstandard") is not None


def encode_change(old: Bytes, new: Bytes, item_bytes: int, zstd: bool | None = None) -> list[bytes]:
    """Codes `new`, given `old` of the same length, as one piece per 4 MiB. A piece that did not change is empty.

    `item_bytes` is the size of one number. It affects the size of the result only.
    """
    if len(old) != len(new):
        raise ValueError(
            f"cannot code a change from {len(old):,} to {len(new):,} bytes; both must be equally long"
        )
    tag, compress = _compressor(has_zstd() if zstd is None else zstd)

    def encode(start: int) -> bytes:
        end = start + PIECE_BYTES
        change = old[start:end] ^ new[start:end]
        if not change.any():
            return b""
        return b"".join(_with_length(_pack(plane, tag, compress)) for plane in _shuffled(change, item_bytes))

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(encode, range(0, len(new), PIECE_BYTES)))


def decode_change(old: Bytes, pieces: Sequence[Content], item_bytes: int) -> Bytes:
    """The new bytes. Raises ValueError if the pieces are damaged or do not cover the old bytes."""
    starts = range(0, len(old), PIECE_BYTES)
    if len(starts) != len(pieces):
        raise ValueError(f"damaged: {len(pieces)} coded pieces for {len(starts)}")
    new = old.copy()

    def decode(start: int, piece: Content) -> None:
        if piece:
            part = new[start : start + PIECE_BYTES]
            part ^= _unshuffled(_planes(piece), len(part), item_bytes)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(decode, starts, pieces))
    return new


def _shuffled(change: Bytes, item_bytes: int) -> list[Bytes]:
    """The first bytes of all items, then the second ones, and so on; last the bytes after the last whole item."""
    whole = len(change) - len(change) % item_bytes
    return [*np.ascontiguousarray(change[:whole].reshape(-1, item_bytes).T), change[whole:]]


def _unshuffled(planes: Sequence[Content], length: int, item_bytes: int) -> Bytes:
    whole = length - length % item_bytes
    expected = [whole // item_bytes] * item_bytes + [length - whole]
    if [len(plane) for plane in planes] != expected:
        raise ValueError("damaged: a coded piece has another length")
    change = np.empty(length, np.uint8)
    items = change[:whole].reshape(-1, item_bytes)
    for index, plane in enumerate(planes[:item_bytes]):
        items[:, index] = np.frombuffer(plane, np.uint8)
    change[whole:] = np.frombuffer(planes[item_bytes], np.uint8)
    return change


def _compressor(zstd: bool) -> tuple[bytes, Callable[[bytes], bytes]]:
    if zstd:
        library: Any = import_module("zstandard")
        return ZSTD, lambda content: library.ZstdCompressor(level=COMPRESSION_LEVEL).compress(content)
    return ZLIB, lambda content: zlib.compress(content, COMPRESSION_LEVEL)


def _pack(plane: Bytes, tag: bytes, compress: Callable[[bytes], bytes]) -> bytes:
    """Compresses one plane if that pays, which a sample from its middle tells: the last digits are noise."""
    content, middle = plane.tobytes(), len(plane) // 2
    sample = content[max(0, middle - SAMPLE_BYTES // 2) : middle + SAMPLE_BYTES // 2]
    if not sample or len(compress(sample)) > (1 - MIN_SAVING) * len(sample):
        return RAW + content
    return tag + compress(content)


def _unpack(packed: Content) -> Content:
    tag, content = bytes(packed[:1]), packed[1:]
    if tag == RAW:
        return content
    if tag == ZLIB:
        try:
            return zlib.decompress(content)
        except zlib.error as error:
            raise ValueError(f"damaged: {error}") from error
    if tag != ZSTD:
        raise ValueError(f"damaged: unknown codec {tag!r}")
    if not has_zstd():
        raise ValueError("coded with zstd; install the package zstandard here too")
    library: Any = import_module("zstandard")
    try:
        plain: bytes = library.ZstdDecompressor().decompress(content)
    except library.ZstdError as error:
        raise ValueError(f"damaged: {error}") from error
    return plain


def _with_length(packed: bytes) -> bytes:
    return len(packed).to_bytes(LENGTH_BYTES, "little") + packed


def _planes(piece: Content) -> list[Content]:
    planes: list[Content] = []
    offset = 0
    while offset < len(piece):
        start = offset + LENGTH_BYTES
        offset = start + int.from_bytes(piece[start - LENGTH_BYTES : start], "little")
        planes.append(_unpack(piece[start:offset]))
    return planes
