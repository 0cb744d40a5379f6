"""Writes files whole or not at all."""

from __future__ import annotations

from pathlib import Path

from digenrl.config.reading import ConfigError


def check_writable(path: Path) -> Path:
    """Complains before any work starts if `path` could not be written."""
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; create it first")
    return path


def write_atomically(path: Path, text: str) -> None:
    """Writes beside the target and renames, so that nobody sees half a file."""
    check_writable(path)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
