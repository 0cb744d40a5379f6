"""`lanes.cards`: several cards in mode colocated, as the lanes of mode local that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from digenrl.config.limits import Lanes
from digenrl.config.reading import ConfigError

_LANES: TypeAdapter[int] = TypeAdapter(Lanes)


def cards_as_lanes(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a recipe without `lanes.cards`; unchanged if it has none, or if its sections are not valid.

    Raises ConfigError for other keys that contradict it.
    """
    lanes, techniques = content.get("lanes"), content.get("techniques", {})
    if not isinstance(lanes, Mapping) or not isinstance(techniques, Mapping):
        return content
    try:
        cards = _LANES.validate_python(lanes.get("cards", 1))
    except ValidationError:
        return content
    if cards == 1:
        return content
    mode, generators = content.get("mode", "local"), lanes.get("generators", cards - 1)
    if mode != "colocated":
        why = f"{cards} in mode {mode}, which has a trainer and lanes.generators"
        raise _conflict(f"{why}; set mode to colocated, or leave it out")
    count = len(generators) if isinstance(generators, list | tuple) else generators
    if count != cards - 1:
        why = f"{cards} cards are one trainer and {cards - 1} generators, but lanes.generators is {count}"
        raise _conflict(f"{why}; leave that out")
    contrary = (techniques.get("assist", "both") != "both", techniques.get("tag") in ("none", False))
    for key, conflicts in zip(("assist", "tag"), contrary, strict=True):
        if conflicts:
            why = f"{cards} cards all generate and train, but techniques.{key} is {techniques[key] or 'none'}"
            raise _conflict(f"{why}; leave that out")
    return {
        **content,
        "mode": "local",
        "lanes": {
            "rewards": 0,
            **{key: each for key, each in lanes.items() if key != "cards"},
            "generators": generators,
        },
        "techniques": {**techniques, "assist": "both"},
    }


def _conflict(why: str) -> ConfigError:
    return ConfigError(f"lanes.cards: {why}", "lanes.cards")
