"""Writes files completely or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from digenrl.config.reading import ConfigError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
YAML_ENDINGS = (".yaml", ".yml")


def check_writable(path: Path) -> Path:
    """Raises ConfigError if a file at `path` could not be written; returns the path."""
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: no such folder: {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written: {path.parent} is read-only; name a file in another folder")
    return path


def check_is_no_input(path: Path, inputs: Iterable[Path], option: str) -> None:
    """Raises ConfigError if the file that `option` writes is one of those that the command reads."""
    if path.resolve() in {each.resolve() for each in inputs}:
        raise ConfigError(f"{option}: {path} is a file that this command reads; choose another name")


def check_new_file(path: Path, force: bool, option: str = "--out") -> None:
    """Raises ConfigError if a file at `path`, which `option` names, exists or could not be written."""
    if check_writable(path).exists() and not force:
        raise ConfigError(f"{path}: exists; add --force to overwrite it, or choose another file with {option}")


def check_new_yaml(path: Path, force: bool, option: str = "--out") -> None:
    """As `check_new_file`; also for a name by which the file could not be read again as YAML."""
    if path.suffix not in YAML_ENDINGS:
        raise ConfigError(f"{option}: writes YAML, got {path}; choose a name that ends in .yaml")
    check_new_file(path, force, option)


def writing_error(path: Path, error: OSError) -> Exception:
    """The error to raise where `path` could not be written. A full disk is not a user's mistake."""
    if error.errno in NO_SPACE:
        return OSError(error.errno, os.strerror(error.errno), str(path))
    return ConfigError(f"{path}: cannot be written: {error.strerror or error}")


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Writes a temporary file and renames it, so that readers never see a partial file.

    A `durable` file is on disk before the old one is replaced, so that a machine that fails leaves one of them.
    """
    check_writable(path)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        if durable:
            sync(partial)
        partial.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise writing_error(path, error) from None
    finally:
        with suppress(OSError):  # it does not exist, or cannot be removed either
            partial.unlink()
