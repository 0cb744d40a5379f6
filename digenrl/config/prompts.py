"""Settings of a recipe's prompts."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from digenrl.config.reading import Frozen, nearest

PROMPT_FORMATS = (".txt", ".jsonl", ".parquet")


class PromptSettings(Frozen):
    """A file of prompts, and whether they are drawn in shuffled order, by the run's seed."""

    path: Path
    column: str = Field(default="prompt", min_length=1, description="the prompt's key in .jsonl and .parquet")
    shuffle: bool = True

    @field_validator("path")
    @classmethod
    def _has_a_known_format(cls, path: Path) -> Path:
        if path.suffix not in PROMPT_FORMATS:
            known = nearest(path.suffix, list(PROMPT_FORMATS))
            raise ValueError(f"{path}: cannot read prompts from a '{path.suffix}' file; {known}")
        return path
