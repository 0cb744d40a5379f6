"""The folders that commands write into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.run_folder.folder import numbered_path
from digenrl.telemetry.writing import writing_error
from digenrl.training.checkpoint.atomic_folders import written_atomically
from digenrl.worker.clips import ClipError


@contextmanager
def new_folder(given: Path | None, parent: Path, name: str) -> Iterator[Path]:
    """An empty folder to write to; it is removed again if it stays empty."""
    try:
        if given is not None:
            given.mkdir(parents=True, exist_ok=True)
        folder = given or numbered_path(parent, name)
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--out: {given}: cannot be written: {error.strerror or error}") from None
    if inside:
        raise ConfigError(f"--out: {folder} is not empty, it has {inside[0].name}; name a new folder")
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


@contextmanager
def written_files(folder: Path) -> Iterator[Path]:
    """As `written_atomically`, with an error in one line if the files cannot be written."""
    try:
        with written_atomically(folder) as partial:
            yield partial
    except OSError as error:
        raise writing_error(folder, error) from None
    except ClipError as error:
        raise ConfigError(f"{folder}: {error}") from None
