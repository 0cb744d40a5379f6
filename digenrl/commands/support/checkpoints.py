"""The checkpoint that a command is about."""

from __future__ import annotations

from pathlib import Path

from digenrl.config.reading import ConfigError, nearest
from digenrl.run_folder.folder import RunFolder
from digenrl.training.checkpoint.format import checkpoints_in

UNTRAINED = "before"  # instead of a checkpoint's name


def find_checkpoint(folder: RunFolder, name: str | None) -> Path | None:
    """The checkpoint of this name, or the newest if no name is given; None for the untrained model."""
    if name == UNTRAINED:
        return None
    found = {path.name: path for path in checkpoints_in(folder.checkpoints)}
    if name is None:
        if not found:
            raise ConfigError(
                f"{folder.path}: has no checkpoint yet; for the untrained model, add --checkpoint {UNTRAINED}"
            )
        return list(found.values())[-1]
    if name not in found:
        raise ConfigError(f"--checkpoint: unknown '{name}'; {nearest(name, [UNTRAINED, *found])}")
    return found[name]
