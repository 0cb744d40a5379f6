"""The folders that commands write into."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from digenrl.config.reading import ConfigError, one_line
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
        folder = given or _numbered_path(parent, name)
        inside = sorted(folder.iterdir())
    except FileExistsError:
        raise ConfigError(f"--out: {given}: is a file; name a new folder") from None
    except OSError as error:
        raise ConfigError(f"--out: {given}: cannot be written: {error.strerror or error}") from None
    if inside:
        raise ConfigError(f"--out: {folder} is not empty, it has {inside[0].name}; name a new folder")
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


def _numbered_path(parent: Path, name: str) -> Path:
    try:
        return numbered_path(parent, name)
    except ConfigError as error:
        raise ConfigError(f"{error}; name a folder elsewhere with --out") from None


@contextmanager
def written_files(folder: Path) -> Iterator[Path]:
    """As `written_atomically`, with an error in one line if the files cannot be written."""
    try:
        with written_atomically(folder) as partial:
            yield partial
    except OSError as error:
        raise writing_error(folder, error) from None
    except SafetensorError as error:
        raise writing_error(folder, _as_os_error(error)) from None
    except ClipError as error:
        raise ConfigError(f"{folder}: {error}") from None


def _as_os_error(error: SafetensorError) -> OSError:
    """What went wrong, which the safetensors library says only in words."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(one_line(error)) if number is None else OSError(int(number[1]), os.strerror(int(number[1])))
