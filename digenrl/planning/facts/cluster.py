"""The CLUSTER file: pools of cards, their nodes and network, and measured costs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from digenrl.config.limits import Text
from digenrl.config.profiles import NonNegativeSeconds, PositiveSeconds, Profile, find_profile, read_profile
from digenrl.config.reading import Frozen, errors_about, errors_in, parse_model, read_mapping
from digenrl.planning.facts.cards import Card, Positive, find_card, known_cards, undescribed_card
from digenrl.planning.facts.constants import CONSTANTS
from digenrl.planning.facts.model_facts import Whole
from digenrl.planning.sites.groups import SiteLink, check_sites

MOST_CARDS = 16_384


class Measured(Frozen):
    """Times measured on one card of a pool, in seconds; the cost model supplies the rest.

    `slice_seconds` maps a slice size to the time of a lane; sizes between two measured ones are interpolated,
    other sizes are not used. `train_seconds_per_sample` is the time of one rank per generated sample; several
    ranks share the pairs of a group. `publish_seconds` is the time from a commit until the pool's lanes have the
    new version, `score_seconds` the time of one sample on a reward lane, `switch_seconds` the time of one role
    switch.
    """

    slice_seconds: Annotated[dict[Whole, PositiveSeconds], Field(min_length=1)] | None = None
    train_seconds_per_sample: PositiveSeconds | None = None
    commit_seconds: NonNegativeSeconds | None = None
    publish_seconds: NonNegativeSeconds | None = None
    score_seconds: NonNegativeSeconds | None = None
    switch_seconds: NonNegativeSeconds | None = None

    @classmethod
    def from_profile(cls, profile: Profile) -> Measured:
        training = profile.training
        return cls(
            slice_seconds=profile.slice_seconds or None,
            train_seconds_per_sample=None if training is None else training.seconds_per_sample,
            commit_seconds=profile.shared_commit_seconds,
            publish_seconds=profile.publish_seconds,
            score_seconds=profile.score_seconds,
            switch_seconds=profile.switch_seconds,
        )

    @property
    def complete(self) -> bool:
        """Whether both generation and training were measured."""
        return self.slice_seconds is not None and self.train_seconds_per_sample is not None

    def covers(self, size: int) -> bool:
        """Whether a slice of this size was measured, or lies between two measured sizes."""
        return self.slice_seconds is not None and min(self.slice_seconds) <= size <= max(self.slice_seconds)

    def slice_s(self, size: int) -> float:
        """The time of a slice whose size is covered."""
        assert self.slice_seconds is not None and self.covers(size)
        if size in self.slice_seconds:
            return self.slice_seconds[size]
        below, above = next(pair for pair in pairwise(sorted(self.slice_seconds)) if pair[0] < size < pair[1])
        below_s, above_s = self.slice_seconds[below], self.slice_seconds[above]
        return below_s + (above_s - below_s) * (size - below) / (above - below)


class CardPool(Frozen):
    """Equal nodes of equal cards. `network_gbit_s` is the bandwidth of one node, shared by its cards.

    A pool with `measured` costs needs only a `name` instead of a card. A `profile` supplies measured costs, and
    the card if none is given; it is valid only for the work that was profiled. `accelerator`, `labels` and
    `resources` select the pool's machines in a Ray cluster; by default the card's accelerator does. Pools of
    different `site`s are connected by the links of the cluster's `sites`.
    """

    card: Card
    name: str = Field(default="", validate_default=True)
    nodes: Whole = 1
    per_node: Whole = 8
    network_gbit_s: Positive = 100.0
    usd_per_hour: Annotated[float, Field(ge=0)] | None = None
    measured: Measured = Measured()
    profile: Profile | None = None
    accelerator: Text | None = None
    labels: dict[str, str] = Field(default={})
    resources: dict[str, Positive] = Field(default={})
    site: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.nodes, self.per_node))

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_card(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        content = _with_profile(content)
        if content.get("card") is not None:
            return content
        name = content.get("name")
        if not content.get("measured") or not isinstance(name, str) or not name:
            raise ValueError("no card; give one, as card: H100, or a name and measured costs, or a profile")
        return {**content, "card": undescribed_card(name)}

    @field_validator("card", mode="before")
    @classmethod
    def _look_up_the_card(cls, value: Any) -> Any:
        return find_card(value) if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _default_to_the_card(cls, name: str, info: ValidationInfo) -> str:
        card = info.data.get("card")
        return name or (card.name if card is not None else "")

    @property
    def cards(self) -> int:
        return self.nodes * self.per_node

    @property
    def usd_per_card_hour(self) -> float:
        return self.card.usd_per_hour if self.usd_per_hour is None else self.usd_per_hour

    @property
    def place(self) -> dict[str, Any]:
        """The keys that select the pool's machines in a Ray cluster; empty if nothing does."""
        given = {"accelerator": self.accelerator, "labels": {**self.labels}, "resources": {**self.resources}}
        chosen = {key: value for key, value in given.items() if value}
        if not chosen and self.card.accelerator is not None:
            chosen = {"accelerator": self.card.accelerator}
        return chosen


def _with_profile(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pool's content, with measured costs and card taken from its profile, if any."""
    given = content.get("profile")
    if given is None:
        return content
    if content.get("measured"):
        raise ValueError("profile and measured: both give measured costs; leave one of them out")
    profile = read_profile(given) if isinstance(given, str) else given
    if not isinstance(profile, Profile):
        raise ValueError(f"profile: expected a name or a file, got {given!r}")
    filled = {**content, "profile": profile, "measured": Measured.from_profile(profile)}
    if content.get("card") is None:
        device = profile.device.name
        cards = [card for card in known_cards() if card.name.lower() in device.lower()]
        if cards:  # the longest match: "H20" is also part of "H200"
            filled["card"] = max(cards, key=lambda card: len(card.name))
        else:
            filled["name"] = content.get("name") or device
    return filled


class Cluster(Frozen):
    """Pools of cards with unique names, and the links between their sites; a pool's default name is its card's."""

    pools: tuple[CardPool, ...]
    sites: tuple[SiteLink, ...] = ()

    @model_validator(mode="after")
    def _names_are_unique(self) -> Cluster:
        if not self.pools:
            raise ValueError("no pools; give at least one, as {card: H100, nodes: 1, per_node: 8}")
        names = [pool.name for pool in self.pools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"pools: '{twice}' is used twice; put its nodes in one pool, or give each pool a unique name"
            )
        if self.cards > MOST_CARDS:
            raise ValueError(f"pools: {self.cards:,} cards in all; plans are for up to {MOST_CARDS:,}")
        check_sites({pool.name: pool.site for pool in self.pools}, self.sites)
        return self

    def with_memory_limit(self, gib: float | None) -> Cluster:
        """The cluster if no worker may use more than this on a card."""
        if gib is None:
            return self
        card_gib = gib / (1 - CONSTANTS.memory_headroom)  # of which plans use all but the headroom
        pools = []
        for pool in self.pools:
            card = pool.card.model_copy(update={"memory_gib": min(card_gib, pool.card.memory_gib)})
            pools.append(pool.model_copy(update={"card": card}))
        return self.model_copy(update={"pools": tuple(pools)})

    @property
    def cards(self) -> int:
        return sum(pool.cards for pool in self.pools)

    @property
    def site_names(self) -> tuple[str, ...]:
        """The sites of all pools, in the order of the pools."""
        return tuple(dict.fromkeys(pool.site for pool in self.pools))


def files_of_cluster(path: Path) -> list[Path]:
    """The files that `read_cluster` reads: that of the cluster, and profiles."""
    return [path, *(Path(pool["profile"]) for pool in _pools_with_a_profile(_content_of(path)))]


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster from a YAML or JSON file; raises ConfigError with one line about the first mistake.

    A pool's profile file is relative to the folder of the cluster file.
    """
    content = _content_of(path)
    with errors_in(path):
        return parse_model(Cluster, content)


def _content_of(path: Path) -> dict[str, Any]:
    """The content of a cluster file; the profiles of pools are paths."""
    content = read_mapping(path)
    pools = content["pools"] if isinstance(content.get("pools"), list) else []
    for pool in _pools_with_a_profile(content):
        with errors_in(path), errors_about(f"pools[{pools.index(pool)}].profile"):
            pool["profile"] = str(find_profile(pool["profile"], path.parent))
    return content


def _pools_with_a_profile(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    pools = content.get("pools")
    several = pools if isinstance(pools, list) else []
    return [pool for pool in several if isinstance(pool, dict) and isinstance(pool.get("profile"), str)]
