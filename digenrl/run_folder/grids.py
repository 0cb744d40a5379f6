"""Held-out pictures side by side, and what they were to show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from digenrl.run_folder.folder import RunFolder
from digenrl.telemetry.writing import write_atomically

GAP = 2  # pixels between pictures
BACKGROUND = (128, 128, 128)


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """The reward of one held-out sample, and its parts."""

    prompt: str
    reward: float
    parts: Mapping[str, float]


def write_grid(folder: RunFolder, steps_done: int, pictures: Path, scores: Sequence[HeldOutScore]) -> Path:
    """Writes the grid and its words; the single pictures go. Returns the grid's path."""
    images = [Image.open(path).convert("RGB") for path in sorted(pictures.glob("*.png"))]
    columns = columns_for(len(images))
    target = folder.grid(steps_done)
    partial = target.with_suffix(".part")
    with partial.open("wb") as file:
        side_by_side(images, columns).save(file, format="PNG")
    partial.replace(target)
    items = [{"prompt": s.prompt, "reward": s.reward, "parts": dict(s.parts)} for s in scores[: len(images)]]
    words = {"columns": columns, "gap": GAP, "items": items}
    write_atomically(folder.grid_words(steps_done), json.dumps(words, indent=1))
    shutil.rmtree(pictures)
    return target


def columns_for(count: int) -> int:
    """About as many columns as rows, at most 8.

    >>> [columns_for(count) for count in (1, 4, 16, 40, 100)]
    [1, 2, 4, 6, 8]
    """
    return max(1, min(8, int(count**0.5)))


def side_by_side(images: Sequence[Image.Image], columns: int) -> Image.Image:
    """All pictures, row by row; they have one size."""
    width, height = images[0].size
    rows = -(-len(images) // columns)
    grid = Image.new("RGB", (columns * (width + GAP) + GAP, rows * (height + GAP) + GAP), BACKGROUND)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        grid.paste(image, (GAP + column * (width + GAP), GAP + row * (height + GAP)))
    return grid
