"""`digenrl prompts`: lists the prompt sets, and prints or writes their prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from digenrl.config.reading import ConfigError, nearest, parse_model
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.prompt_sets.contract import STANDARD_COUNT, GeneratedPrompt
from digenrl.prompt_sets.registry import PROMPT_SETS
from digenrl.telemetry.writing import check_new_file, write_atomically

PRINTED = 20  # prompts, if no number is given
FORMATS: dict[str, Callable[[GeneratedPrompt], str]] = {
    ".txt": lambda prompt: prompt.text,
    ".jsonl": GeneratedPrompt.as_json_line,
}


def sets_table() -> Table:
    """All prompt sets, what they are about, which rewards they suit, and their columns."""
    table = Table("name", "prompts about", "for rewards", "columns", box=None, pad_edge=False)
    for each in PROMPT_SETS.values():
        table.add_row(each.name, each.description, each.fits, ", ".join(each.columns))
    return table


def sets_as_json() -> list[dict[str, Any]]:
    """All prompt sets as plain JSON values."""
    return [
        {"name": each.name, "about": each.description, "rewards": each.fits, "columns": dict(each.columns)}
        for each in PROMPT_SETS.values()
    ]


def draw_prompts(name: str, split: str, count: int | None, seed: int) -> list[GeneratedPrompt]:
    """The prompts that a recipe with these settings would use."""
    try:
        settings = parse_model(PromptSettings, {"name": name, "split": split, "count": count, "seed": seed})
    except ConfigError as error:
        option = "NAME" if error.where == "name" else f"--{error.where}"
        raise ConfigError(f"{option}: {str(error).removeprefix(f'{error.where}: ')}") from None
    prompts = PROMPT_SETS[name].prompts(settings.split, count, seed)
    if len(prompts) < (count or STANDARD_COUNT[settings.split]):
        raise ConfigError(f"--count: {name} has {len(prompts)} {split} prompts with seed {seed}; ask for fewer")
    return prompts


def write_prompts(prompts: Sequence[GeneratedPrompt], path: Path) -> None:
    """One prompt per line: its text in a .txt file, its text and columns in a .jsonl file."""
    write_atomically(path, "".join(f"{FORMATS[path.suffix](prompt)}\n" for prompt in prompts))


def check_file(path: Path, force: bool) -> None:
    """Raises ConfigError unless prompts can be written to this file."""
    if path.suffix not in FORMATS:
        known = nearest(path.suffix, list(FORMATS))
        raise ConfigError(f"--out: cannot write prompts to a '{path.suffix}' file; {known}")
    check_new_file(path, force)
