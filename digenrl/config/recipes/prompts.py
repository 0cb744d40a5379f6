"""Settings of a recipe's prompts: a file, or a prompt set that ships with DigenRL."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveInt, field_validator, model_validator

from digenrl.config.limits import DRAWN_PROMPTS, Text
from digenrl.config.reading import Frozen, nearest
from digenrl.prompt_sets.contract import PromptSet, Split
from digenrl.prompt_sets.registry import PROMPT_SETS

PROMPT_FORMATS = (".txt", ".jsonl", ".parquet")
IMAGE_COLUMNS = ("image", "images")  # of source images, by default


class PromptSettings(Frozen):
    """A file of prompts (`path`) or a prompt set (`name`); the first `count` of them are used.

    `seed` and `split` say which prompts of the set. `shuffle` draws them in another order in every epoch, by the
    run's seed. With `pair_columns` every prompt has a chosen and a rejected image, which take the place of
    generated samples.
    """

    path: Path | None = None
    column: Text = Field(default="prompt", description="the prompt's key in .jsonl and .parquet")
    image_column: Text | None = Field(
        default=None, description="likewise, of its source images; `image` or `images` by default"
    )
    pair_columns: tuple[str, str] | None = Field(
        default=None, description="likewise, of the chosen and of the rejected image; [chosen, rejected]"
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
            if not path.suffix:
                raise ValueError(
                    f"{path}: is not a file of prompts; its name must end in {', '.join(PROMPT_FORMATS)}"
                )
            known = nearest(path.suffix, list(PROMPT_FORMATS))
            raise ValueError(f"{path}: cannot read prompts from a '{path.suffix}' file; {known}")
        return path

    @field_validator("name")
    @classmethod
    def _is_a_prompt_set(cls, name: str | None) -> str | None:
        if name is not None and name not in PROMPT_SETS:
            known = nearest(name, list(PROMPT_SETS))
            raise ValueError(f"unknown prompt set '{name}'; {known}")
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

    @model_validator(mode="after")
    def _pairs_are_in_columns(self) -> PromptSettings:
        if self.pair_columns is None:
            return self
        if self.path is None or self.path.suffix == ".txt":
            where = f"path: {self.path}" if self.path else f"name: {self.name}"
            raise ValueError(f"pair_columns need a .jsonl or .parquet file with these columns, got {where}")
        taken = {"", self.column, *self.image_columns}
        if len({*self.pair_columns} - taken) < 2:
            raise ValueError(
                f"pair_columns: expected two columns besides those of the prompt and of source images, such as "
                f"[chosen, rejected], got {list(self.pair_columns)}"
            )
        return self

    @property
    def image_columns(self) -> tuple[str, ...]:
        """The columns that may hold source images."""
        return IMAGE_COLUMNS if self.image_column is None else (self.image_column,)

    @property
    def prompt_set(self) -> PromptSet | None:
        """The prompt set, unless the prompts are in a file."""
        return None if self.name is None else PROMPT_SETS[self.name]


class HeldOutPromptSettings(PromptSettings):
    """Prompts of an evaluation: of a prompt set, its held-out split."""

    split: Split = "held_out"
