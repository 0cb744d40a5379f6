"""A fingerprint of the weights that training starts from, so that a run is not resumed with others."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from digenrl.models.sources import ModelSource, weight_files

BLOCKS, BLOCK_BYTES = 64, 1 << 14  # sampled from every file: a change of all weights changes every block


def base_fingerprint(pipeline_class: type[Any], source: ModelSource) -> str:
    """A hash of the names and sizes of the model's weight files, and of blocks of their content.

    It reads about a megabyte per file, and does not depend on where the files are.
    """
    return files_fingerprint(weight_files(pipeline_class, source))


def files_fingerprint(files: Mapping[str, Path]) -> str:
    """The same for files that are given by name."""
    digest = blake2b(digest_size=16)
    for name, path in sorted(files.items()):
        size = path.stat().st_size
        digest.update(f"{name} {size};".encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(max(0, size - BLOCK_BYTES) * block // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
