"""The CLUSTER file: which cards there are, how they sit in nodes, what joins the nodes, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from digenrl.config.profiles import Profile, find_profile, read_profile
from digenrl.config.reading import ConfigError, Frozen, parse_model, read_mapping
from digenrl.planning.cards import Card, Positive, find_card, known_cards, undescribed_card
from digenrl.planning.model_catalogue import Whole

Seconds = Annotated[float, Field(ge=0)]


class Measured(Frozen):
    """Seconds that were measured on one card of a pool; the cost model is asked for the rest.

    `slice_seconds` maps a slice's size to a lane's seconds; sizes between two measured ones are on a straight
    line, others are not planned with. `train_seconds_per_sample` is of one rank, of a sample that was generated;
    several ranks share a group's pairs. `publish_seconds` runs from a commit until the pool's lanes have the new
    version, `score_seconds` is of one sample on a reward lane, `switch_seconds` of one change of a trainer's role.
    """

    slice_seconds: Annotated[dict[Whole, Positive], Field(min_length=1)] | None = None
    train_seconds_per_sample: Positive | None = None
    commit_seconds: Seconds | None = None
    publish_seconds: Seconds | None = None
    score_seconds: Seconds | None = None
    switch_seconds: Seconds | None = None

    @classmethod
    def by(cls, profile: Profile) -> Measured:
        """What a profile says of its device."""
        training = profile.training
        return cls(
            slice_seconds=profile.slice_seconds or None,
            train_seconds_per_sample=None if training is None else training.seconds_per_sample,
            commit_seconds=profile.shared_commit_seconds,
            publish_seconds=profile.publish_seconds,
            score_seconds=profile.score_seconds,
            switch_seconds=profile.switch_seconds,
        )

    def covers(self, size: int) -> bool:
        """Whether a slice of this size was measured, or lies between two that were."""
        return self.slice_seconds is not None and min(self.slice_seconds) <= size <= max(self.slice_seconds)

    def slice_s(self, size: int) -> float:
        """A lane's seconds for a slice of a size that is covered."""
        assert self.slice_seconds is not None and self.covers(size)
        if size in self.slice_seconds:
            return self.slice_seconds[size]
        below, above = next(pair for pair in pairwise(sorted(self.slice_seconds)) if pair[0] < size < pair[1])
        below_s, above_s = self.slice_seconds[below], self.slice_seconds[above]
        return below_s + (above_s - below_s) * (size - below) / (above - below)


class CardPool(Frozen):
    """Equal nodes of equal cards. `network_gbit_s` is what one node sends, shared by its cards.

    With `measured` costs a `name` may stand in place of the card. A `profile` brings measured costs, and the card
    where none is given; it holds for the work that it was made with alone. `accelerator`, `labels` and `resources`
    say which machines of a Ray cluster are the pool's; the accelerator is the card's own where none of them is
    given.
    """

    card: Card
    name: str = Field(default="", validate_default=True)
    nodes: Whole = 1
    per_node: Whole = 8
    network_gbit_s: Positive = 100.0
    usd_per_hour: Annotated[float, Field(ge=0)] | None = None
    measured: Measured = Measured()
    profile: Profile | None = None
    accelerator: str | None = Field(default=None, min_length=1)
    labels: dict[str, str] = Field(default={})
    resources: dict[str, Positive] = Field(default={})

    def __hash__(self) -> int:
        return hash((self.name, self.nodes, self.per_node))

    @model_validator(mode="before")
    @classmethod
    def _measured_machines_need_no_card(cls, content: Any) -> Any:
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
    def _by_name(cls, value: Any) -> Any:
        return find_card(value) if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _else_the_cards(cls, name: str, info: ValidationInfo) -> str:
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
        """What tells Ray the pool's machines from others; empty where nothing does."""
        given = {"accelerator": self.accelerator, "labels": {**self.labels}, "resources": {**self.resources}}
        chosen = {key: value for key, value in given.items() if value}
        if not chosen and self.card.accelerator is not None:
            chosen = {"accelerator": self.card.accelerator}
        return chosen


def _with_profile(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """A pool's content with what its profile, if it has one, stands for."""
    given = content.get("profile")
    if given is None:
        return content
    if content.get("measured"):
        raise ValueError("profile and measured: both say what was measured; leave one of them out")
    profile = read_profile(given) if isinstance(given, str) else given
    if not isinstance(profile, Profile):
        raise ValueError(f"profile: expected a name or a file, got {given!r}")
    filled = {**content, "profile": profile, "measured": Measured.by(profile)}
    if content.get("card") is None:
        device = profile.device.name
        cards = [card for card in known_cards() if card.name.lower() in device.lower()]
        if cards:  # of H20 and H200, the longer name is the one that is meant
            filled["card"] = max(cards, key=lambda card: len(card.name))
        else:
            filled["name"] = content.get("name") or device
    return filled


class Cluster(Frozen):
    """Pools of cards, each with a name of its own: its card's, where it is not given one."""

    pools: tuple[CardPool, ...]

    @model_validator(mode="after")
    def _classes_stay_apart(self) -> Cluster:
        if not self.pools:
            raise ValueError("no pools; give at least one, as {card: H100, nodes: 1, per_node: 8}")
        names = [pool.name for pool in self.pools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"pools: '{twice}' stands twice; put its nodes in one pool, or give each pool a name of its own"
            )
        return self

    @property
    def cards(self) -> int:
        return sum(pool.cards for pool in self.pools)


def read_cluster(path: Path) -> Cluster:
    """The cluster in a YAML or JSON file; raises ConfigError with one line about the first mistake.

    A pool's profile, where it is a file, is looked for beside the cluster's.
    """
    content = read_mapping(path)
    try:
        for index, pool in enumerate(content["pools"] if isinstance(content.get("pools"), list) else ()):
            if isinstance(pool, dict) and isinstance(pool.get("profile"), str):
                pool["profile"] = str(_found(pool["profile"], path.parent, f"pools[{index}].profile"))
        return parse_model(Cluster, content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.where) from None


def _found(profile: str, folder: Path, key: str) -> Path:
    try:
        return find_profile(profile, folder)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}", key) from None
