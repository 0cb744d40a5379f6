"""The 1,000 classes of ImageNet by name."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

CLASSES = 1000


@cache
def class_names() -> tuple[str, ...]:
    """Short names, by index."""
    text = files(__package__).joinpath("imagenet_classes.txt").read_text(encoding="utf-8")
    names = tuple(text.splitlines())
    assert len(set(names)) == CLASSES
    return names


def class_indices(given: Any) -> tuple[int, ...]:
    """The classes that are given as a name, an index, or a list of these. Raises ValueError."""
    if not isinstance(given, list | tuple):
        given = (given,)
    if not given:
        raise ValueError("no ImageNet class is given; name at least one")
    return tuple(dict.fromkeys(_index(one) for one in given))


def _index(given: Any) -> int:
    if type(given) is int and 0 <= given < CLASSES:
        return given
    known = {name.lower(): index for index, name in enumerate(class_names())}
    if isinstance(given, str) and given.strip().lower() in known:
        return known[given.strip().lower()]
    near = get_close_matches(given.lower(), known, n=1, cutoff=0.5) if isinstance(given, str) else []
    hint = f"; did you mean '{class_names()[known[near[0]]]}'?" if near else ""
    raise ValueError(f"not an ImageNet class: {given!r}; use a name or an index from 0 to {CLASSES - 1}{hint}")
