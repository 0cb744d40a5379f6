"""The catalog of cards, from public data sheets (catalog/cards.yaml), and the lookup of catalog entries."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import Field

from digenrl.config.reading import ConfigError, Frozen, nearest, parse_model

Positive = Annotated[float, Field(gt=0)]


class CatalogEntry(Frozen):
    """A named entry of the catalog."""

    name: str
    aliases: tuple[str, ...] = ()


Entry = TypeVar("Entry", bound=CatalogEntry)


class Card(CatalogEntry):
    """A card as described by its data sheet; link rates are per direction. A cluster file can define its own.

    `fp8`: whether it has units for products in fp8.
    """

    accelerator: str | None = None
    bf16_tflops: Positive
    memory_gib: Positive
    memory_gb_s: Positive
    host_gb_s: Positive
    card_link_gb_s: Positive
    usd_per_hour: Annotated[float, Field(ge=0)] = 0.0
    fp8: bool = True
    described: bool = True


def undescribed_card(name: str) -> Card:
    """A card without a data sheet. Nothing fits it in the cost model, so only measured costs can use it.

    Its links are assumed to be PCIe 4.0.
    """
    return Card(
        name=name,
        described=False,
        bf16_tflops=1e-6,
        memory_gib=1e-6,
        memory_gb_s=1e-6,
        host_gb_s=31.5,
        card_link_gb_s=31.5,
    )


@cache
def known_cards() -> tuple[Card, ...]:
    """All cards of the catalog, in file order."""
    return tuple(parse_model(Card, entry) for entry in read_catalog("cards.yaml"))


def find_card(name: str) -> Card:
    """The card with this name or alias; raises ConfigError with the nearest name."""
    return find_entry("card", name, known_cards())


def read_catalog(file_name: str) -> list[dict[str, Any]]:
    """The entries of one catalog file, not yet validated."""
    text = files("digenrl.planning").joinpath("catalog", file_name).read_text(encoding="utf-8")
    entries = yaml.safe_load(text)
    assert isinstance(entries, list), f"catalog/{file_name} must be a list of entries"
    return entries


def find_entry(kind: str, wanted: str, entries: Sequence[Entry]) -> Entry:
    """The entry named `wanted`, ignoring case, spaces, hyphens and underscores.

    Raises ConfigError with the nearest name and all known names.
    """
    by_name = {_normalized(name): entry for entry in entries for name in (entry.name, *entry.aliases)}
    found = by_name.get(_normalized(wanted))
    if found is None:
        names = [entry.name for entry in entries]
        close = difflib.get_close_matches(_normalized(wanted), by_name, n=1, cutoff=0.5)
        raise ConfigError(f"unknown {kind} '{wanted}'; {nearest(by_name[close[0]].name if close else '', names)}")
    return found


def _normalized(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in " -_")
