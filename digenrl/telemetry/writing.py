"""Writes files completely or not at all."""

from __future__ import annotations

from pathlib import Path

from digenrl.config.reading import ConfigError


def check_writable(path: Path) -> Path:
    """Raises ConfigError if a file at `path` could not be written; returns the path."""
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: no such folder: {path.parent}; create it first")
    return path


def write_atomically(path: Path, text: str) -> None:
    """Writes a temporary file and renames it, so that readers never see a partial file."""
    check_writable(path)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
