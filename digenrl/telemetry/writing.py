"""Writes files completely or not at all."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from digenrl.config.reading import ConfigError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def check_writable(path: Path) -> Path:
    """Raises ConfigError if a file at `path` could not be written; returns the path."""
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: no such folder: {path.parent}; create it first")
    return path


def check_new_file(path: Path, force: bool, option: str = "--out") -> None:
    """Raises ConfigError if a file could not be written, or exists and is not to be overwritten."""
    if check_writable(path).exists() and not force:
        raise ConfigError(f"{path}: exists; add --force to overwrite it, or choose another file with {option}")


def write_atomically(path: Path, text: str) -> None:
    """Writes a temporary file and renames it, so that readers never see a partial file."""
    check_writable(path)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise  # not a user's mistake
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # it does not exist, or cannot be removed either
            partial.unlink()
