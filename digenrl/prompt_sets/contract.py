"""What a prompt set is, and how its train and held-out splits are drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from digenrl.prompt_sets.grammar import Draw

Split = Literal["train", "held_out"]

STANDARD_COUNT: dict[Split, int] = {"train": 4096, "held_out": 256}
HELD_OUT_ONE_IN = 8  # the share of subjects that only the held-out split has
FRUITLESS_DRAWS = 10_000  # in a row, after which a set has no more prompts


@dataclass(frozen=True, slots=True)
class GeneratedPrompt:
    """A prompt, what it asks for in a form that a reward can read, and what it is about.

    Prompts with the same `subject` are in the same split.
    """

    text: str
    wants: Mapping[str, Any]
    subject: str

    def as_json_line(self) -> str:
        """The prompt as a line of a .jsonl file: the text under `prompt`, and every want as a column."""
        return json.dumps({"prompt": self.text, **self.wants}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A grammar with a name. `columns` describes its wants, by name."""

    name: str
    description: str
    fits: str  # the rewards that it suits
    draw: Callable[[Draw], GeneratedPrompt]
    columns: Mapping[str, str] = field(default_factory=dict)

    def prompts(self, split: Split = "train", count: int | None = None, seed: int = 0) -> list[GeneratedPrompt]:
        """The first `count` prompts of a split, all different; fewer if the grammar has no more.

        The first prompts are the same for every count. The splits share no subject, whatever their seeds.
        """
        count = STANDARD_COUNT[split] if count is None else count
        found: dict[str, GeneratedPrompt] = {}
        index = newest = 0
        while len(found) < count and index - newest < FRUITLESS_DRAWS:
            prompt = self.draw(Draw(f"{self.name}/{seed}/{index}"))
            if prompt.text not in found and split_of(self.name, prompt.subject) == split:
                found[prompt.text], newest = prompt, index
            index += 1
        return list(found.values())


def split_of(set_name: str, subject: str) -> Split:
    """The split that has all prompts about a subject."""
    digest = blake2b(f"{set_name}/{subject}".encode(), digest_size=8).digest()
    return "train" if int.from_bytes(digest, "big") % HELD_OUT_ONE_IN else "held_out"
