"""Folders that are either complete or absent, even if the process or the machine stops. Does not import torch.

A folder is written next to its target under a hidden name, synced to disk, and renamed. Hidden leftovers of an
interrupted process are removed by the next one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from digenrl.telemetry.writing import sync

SAVING, REPLACED, REMOVING = ".saving-", ".replaced-", ".removing-"


@contextmanager
def written_atomically(target: Path) -> Iterator[Path]:
    """Yields an empty folder to write into; if the block does not raise, it becomes `target`.

    An existing target is replaced. If anything raises, it stays as it was and the new folder is removed.
    """
    partial = partial_folder(target)
    if partial.exists():
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
        _replace(target, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_folder(target: Path) -> Path:
    """The folder that `written_atomically` yields, for other processes that write into it."""
    return target.with_name(SAVING + target.name)


def remove_atomically(folder: Path) -> None:
    """Removes a folder. Its name disappears first, so that a partly removed folder is never taken for complete."""
    hidden = folder.with_name(REMOVING + folder.name)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def tidy(parent: Path) -> None:
    """Restores interrupted replacements, and removes all other leftovers of interrupted processes."""
    restore(parent)
    for path in parent.iterdir():
        if path.name.startswith((SAVING, REPLACED, REMOVING)):
            shutil.rmtree(path)


def restore(parent: Path) -> None:
    """Undoes replacements that were interrupted before the new folder was in place."""
    for replaced in sorted(parent.glob(f"{REPLACED}*")):
        target = replaced.with_name(replaced.name.removeprefix(REPLACED))
        if not target.exists():
            replaced.rename(target)


def _replace(target: Path, partial: Path) -> None:
    replaced = target.with_name(REPLACED + target.name)
    if target.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        target.rename(replaced)
    try:
        partial.rename(target)
        sync(target.parent)
    finally:
        restore(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
