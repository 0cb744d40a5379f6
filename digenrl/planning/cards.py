"""Cards: what one does in a second, holds, and costs, from public data sheets (catalogue/cards.yaml)."""

from __future__ import annotations

from functools import cache
from typing import Annotated

from pydantic import Field

from digenrl.config.reading import Frozen, parse_model
from digenrl.planning.lookup import find, read_catalogue

Positive = Annotated[float, Field(gt=0)]


class Card(Frozen):
    """One card as its data sheet has it; links are one direction. A cluster file may define its own."""

    name: str
    aliases: tuple[str, ...] = ()
    accelerator: str | None = None
    bf16_tflops: Positive
    memory_gib: Positive
    memory_gb_s: Positive
    host_gb_s: Positive
    card_link_gb_s: Positive
    usd_per_hour: Annotated[float, Field(ge=0)] = 0.0
    described: bool = True


def undescribed_card(name: str) -> Card:
    """A machine that no data sheet describes. Nothing fits it by the cost model: only measured costs use it.

    Its links are taken for PCIe 4.0's.
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
    """Every card of the catalogue, in its order."""
    return tuple(parse_model(Card, entry) for entry in read_catalogue("cards.yaml"))


def find_card(name: str) -> Card:
    """The catalogue's card of that name; raises ConfigError naming the nearest one."""
    return find("card", name, known_cards())
