"""Settings of a recipe's prompts: a file, or a prompt set that ships with DigenRL."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveInt, field_validator, model_validator

from digenrl.config.limits import DRAWN_PROMPTS
from digenrl.config.reading import Frozen, nearest
from digenrl.prompt_sets.contract import PromptSet, Split
from digenrl.prompt_sets.registry import PROMPT_SETS

PROMPT_FORMATS = (".txt", ".jsonl", ".parquet")


class PromptSettings(Frozen):
    """A file of prompts (`path`) or a prompt set (`name`); the first `count` of them are used.

    `seed` and `split` say which prompts of the set. `shuffle` draws them in another order in every epoch, by the
    run's seed.
    """

    path: Path | None = None
    column: str = Field(default="prompt", min_length=1, description="the prompt's key in .jsonl and .parquet")
    image_column: str | None = Field(
        default=None, min_length=1, description="likewise, of its source images; `image` or `images` by default"
    )
    name: str | None = None
    split: Split = "train"
    seed: int = Field(default=0, ge=0)
    count: PositiveInt | None = None
    shuffle: bool = True

    @field_validator("path")
    @classmethod
    def _has_a_known_format(cls, path: Path | None) -> Path | None:
        if path is not None and path.suffix not in PROMPT_FORMATS:
            known = nearest(path.suffix, list(PROMPT_FORMATS))
            raise ValueError(f"{path}: cannot read prompts from a '{path.suffix}' file; {known}")
        return path

    @field_validator("name")
    @classmethod
    def _is_a_prompt_set(cls, name: str | None) -> str | None:
        if name is not None and name not in PROMPT_SETS:
            known = nearest(name, list(PROMPT_SETS))
            raise ValueError(f"unknown prompt set '{name}'; {known}; for a file of prompts, set path")
        return name

    @model_validator(mode="after")
    def _one_source(self) -> PromptSettings:
        if self.path is not None and self.name is not None:
            raise ValueError(f"path ({self.path}) and name ({self.name}) are both given; leave one of them out")
        if self.path is None and self.name is None:
            raise ValueError(f"no prompts; give a file (path), or a prompt set (name): {', '.join(PROMPT_SETS)}")
        return self

    @model_validator(mode="after")
    def _can_be_drawn(self) -> PromptSettings:
        if self.name is not None and (self.count or 0) > DRAWN_PROMPTS:
            raise ValueError(f"count = {self.count}; at most {DRAWN_PROMPTS} prompts of a prompt set are drawn")
        return self

    @property
    def prompt_set(self) -> PromptSet | None:
        """The prompt set, unless the prompts are in a file."""
        return None if self.name is None else PROMPT_SETS[self.name]


class HeldOutPromptSettings(PromptSettings):
    """Prompts of an evaluation: of a prompt set, its held-out split."""

    split: Split = "held_out"
