"""The checkpoint that a command is about."""

from __future__ import annotations

from pathlib import Path

from digenrl.config.reading import ConfigError, nearest
from digenrl.run_folder.folder import RunFolder
from digenrl.training.checkpoint.format import checkpoints_in

UNTRAINED = "before"  # instead of a checkpoint's name
_BEFORE = f"--checkpoint {UNTRAINED}"


def find_checkpoint(folder: RunFolder, name: str | None) -> Path | None:
    """As `find_saved`; None for the untrained model."""
    return None if name == UNTRAINED else find_saved(folder, name, f"; for the untrained model, add {_BEFORE}")


def find_saved(folder: RunFolder, name: str | None, instead: str = "") -> Path:
    """The checkpoint of this name, or the newest if no name is given; `instead` says what to do without one."""
    found = {path.name: path for path in checkpoints_in(folder.checkpoints)}
    if name is None:
        if not found:
            raise ConfigError(f"{folder.path}: has no checkpoint yet{instead}")
        return list(found.values())[-1]
    if name not in found:
        raise ConfigError(f"--checkpoint: unknown '{name}'; {nearest(name, [*found])}{instead}")
    return found[name]
