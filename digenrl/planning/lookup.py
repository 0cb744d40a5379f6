"""Reads the catalogue's files, and finds an entry by its name or by one of its aliases."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Protocol, TypeVar

import yaml

from digenrl.config.reading import ConfigError, nearest


class Named(Protocol):
    """An entry of the catalogue."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


Entry = TypeVar("Entry", bound=Named)


def read_catalogue(file_name: str) -> list[dict[str, Any]]:
    """The entries of one catalogue file, as written."""
    text = files("digenrl.planning").joinpath("catalogue", file_name).read_text(encoding="utf-8")
    entries = yaml.safe_load(text)
    assert isinstance(entries, list), f"catalogue/{file_name} must be a list of entries"
    return entries


def find(kind: str, wanted: str, entries: Sequence[Entry]) -> Entry:
    """The entry called `wanted`; case, spaces, hyphens and underscores do not matter.

    Raises ConfigError, with the nearest name and all the known ones, when there is none.
    """
    by_name = {_plain(name): entry for entry in entries for name in (entry.name, *entry.aliases)}
    found = by_name.get(_plain(wanted))
    if found is None:
        names = [entry.name for entry in entries]
        close = difflib.get_close_matches(_plain(wanted), by_name, n=1, cutoff=0.5)
        raise ConfigError(f"unknown {kind} '{wanted}'; {nearest(by_name[close[0]].name if close else '', names)}")
    return found


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in " -_")
