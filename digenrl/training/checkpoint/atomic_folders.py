"""Folders that are complete or absent, whenever a process or a machine stops.

A folder is written beside its place under a hidden name, brought to the disk, and renamed. Hidden leftovers of a
process that was stopped are tidied by the next one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAVING, REPLACED, REMOVING = ".saving-", ".replaced-", ".removing-"


@contextmanager
def written_atomically(target: Path) -> Iterator[Path]:
    """Inside, an empty folder to write into; after a block that did not raise it stands as `target`.

    What stood there before is replaced. If anything raises, it stays as it was and the new folder is gone.
    """
    partial = partial_of(target)
    if partial.exists():
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        yield partial
        _bring_to_disk(partial)
        _put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_of(target: Path) -> Path:
    """Where `written_atomically` has a folder written, for others who write into it too."""
    return target.with_name(SAVING + target.name)


def remove_atomically(folder: Path) -> None:
    """Gone at once by its name, so that nobody takes what is left of it for the whole."""
    hidden = folder.with_name(REMOVING + folder.name)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def tidy(parent: Path) -> None:
    """Removes what a stopped process left behind."""
    restore(parent)
    for path in parent.iterdir():
        if path.name.startswith((SAVING, REPLACED, REMOVING)):
            shutil.rmtree(path)


def restore(parent: Path) -> None:
    """Puts back folders whose replacement had not arrived when the process stopped."""
    for aside in sorted(parent.glob(f"{REPLACED}*")):
        target = aside.with_name(aside.name.removeprefix(REPLACED))
        if not target.exists():
            aside.rename(target)


def _put_in_place(partial: Path, target: Path) -> None:
    aside = target.with_name(REPLACED + target.name)
    if target.exists():
        if aside.exists():
            shutil.rmtree(aside)
        target.rename(aside)
    try:
        partial.rename(target)
        _sync(target.parent)
    finally:
        restore(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _bring_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
