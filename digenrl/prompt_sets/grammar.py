"""Grammars that write text: rules with slots, expanded by reproducible random choices."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TypeVar

Item = TypeVar("Item")
SLOT = re.compile(r"\[(a )?(?:(\d+)-(\d+)|([A-Za-z_]+))\]")
VOWEL_SOUND = re.compile(r"(?!uni|use|eu|one\b|ukulele)[aeiou]|hour|honest|8|11\b|18\b", re.IGNORECASE)


class Draw:
    """Random choices that depend on a key alone: the same on every machine and in every version of Python."""

    def __init__(self, key: str) -> None:
        self._numbers = _random_numbers(key)

    def below(self, count: int) -> int:
        """A number from 0 to count - 1."""
        return next(self._numbers) % count

    def one(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def different(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` different items, in random order."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def _random_numbers(key: str) -> Iterator[int]:
    for block in itertools.count():
        yield from struct.unpack(">8Q", blake2b(f"{key}/{block}".encode()).digest())


class Grammar:
    """Rules by name, each a sequence of alternatives with slots.

    `[fruit]` is an alternative of the rule `fruit`, `[Fruit]` the same in title case, `[FRUIT]` in capitals.
    `[a fruit]` has the article a or an in front, and `[10-99]` is a number.
    """

    def __init__(self, rules: Mapping[str, Sequence[str]]) -> None:
        self.rules = rules

    def expand(self, text: str, draw: Draw) -> str:
        """The text with every slot filled, from left to right."""
        return SLOT.sub(lambda slot: self._fill(slot, draw), text)

    def _fill(self, slot: re.Match[str], draw: Draw) -> str:
        article, low, high, name = slot.groups()
        if name is None:
            filled = str(int(low) + draw.below(int(high) - int(low) + 1))
        else:
            filled = self.expand(draw.one(self.rules[name.lower()]), draw)
            if name.isupper():
                filled = filled.upper()
            elif name[0].isupper():
                filled = title_case(filled)
        return with_article(filled) if article else filled


def listed(text: str) -> tuple[str, ...]:
    """The alternatives of a text in which semicolons separate them; a dash is the empty one.

    >>> listed("an owl; a cat; -")
    ('an owl', 'a cat', '')
    """
    items = (" ".join(item.split()) for item in text.split(";"))
    return tuple("" if item == "-" else item for item in items)


def with_article(noun: str) -> str:
    """The noun with its indefinite article.

    >>> [with_article(noun) for noun in ("owl", "cat", "old cat", "unicorn", "hourglass", "umbrella")]
    ['an owl', 'a cat', 'an old cat', 'a unicorn', 'an hourglass', 'an umbrella']
    """
    return f"{'an' if VOWEL_SOUND.match(noun) else 'a'} {noun}"


def title_case(text: str) -> str:
    """Every word with a capital, the rest unchanged.

    >>> title_case("grandma's apple pie")
    "Grandma's Apple Pie"
    """
    return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))


def sentence(text: str) -> str:
    """The text with a capital at its beginning."""
    return text[:1].upper() + text[1:]
