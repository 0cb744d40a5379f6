"""The CLUSTER file: which cards there are, how they sit in nodes, and what joins the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from digenrl.config.reading import Frozen, read_model
from digenrl.planning.cards import Card, Positive, find_card
from digenrl.planning.models import Whole


class CardPool(Frozen):
    """Equal nodes of equal cards. `network_gbit_s` is what one node sends, shared by its cards."""

    card: Card
    nodes: Whole = 1
    per_node: Whole = 8
    network_gbit_s: Positive = 100.0
    usd_per_hour: Annotated[float, Field(ge=0)] | None = None

    @field_validator("card", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return find_card(value) if isinstance(value, str) else value

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def cards(self) -> int:
        return self.nodes * self.per_node

    @property
    def usd_per_card_hour(self) -> float:
        return self.card.usd_per_hour if self.usd_per_hour is None else self.usd_per_hour


class Cluster(Frozen):
    """Pools of cards; a class of cards stays one pool, so its name stands once."""

    pools: tuple[CardPool, ...]

    @model_validator(mode="after")
    def _classes_stay_apart(self) -> Cluster:
        if not self.pools:
            raise ValueError("no pools; give at least one, as {card: H100, nodes: 1, per_node: 8}")
        names = [pool.name for pool in self.pools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"pools: '{twice}' stands twice; put its nodes in one pool, or give a custom card another name"
            )
        return self

    @property
    def cards(self) -> int:
        return sum(pool.cards for pool in self.pools)


def read_cluster(path: Path) -> Cluster:
    """The cluster in a YAML or JSON file; raises ConfigError with one line about the first mistake."""
    return read_model(Cluster, path)
