"""A fingerprint of the weights that training starts from, so that a run is not resumed with others."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

BLOCKS, BLOCK_BYTES = 64, 1 << 14  # sampled from every file: a change of all weights changes every block


def files_fingerprint(files: Mapping[str, Path]) -> str:
    """A hash of the names and sizes of a model's weight files, and of blocks of their content.

    It reads about a megabyte per file, and does not depend on where the files are.
    """
    digest = blake2b(digest_size=16)
    for name, path in sorted(files.items()):
        size = path.stat().st_size
        digest.update(f"{name} {size};".encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(max(0, size - BLOCK_BYTES) * block // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
