"""Grids of held-out samples: one PNG per evaluation, and a JSON file with the prompt and reward of every cell.

The clips of videos are beside the grid, one MP4 per cell: `step_000010_0003.mp4` is that of the fourth cell.
"""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from digenrl.config.reading import Frozen, read_model
from digenrl.run_folder.folder import RunFolder
from digenrl.telemetry.writing import write_atomically

if TYPE_CHECKING:  # reading grids does not need Pillow
    from PIL import Image

GAP = 2  # pixels between samples
BACKGROUND = (128, 128, 128)


class GridCell(Frozen):
    """The prompt of one sample, its reward and the reward's parts; null where they are not known."""

    prompt: str
    reward: float | None = None
    parts: dict[str, float | None] = Field(default={})

    def known_parts(self) -> dict[str, float]:
        return {name: value for name, value in self.parts.items() if value is not None}


class GridCaptions(Frozen):
    """The JSON file beside a grid; `gap` pixels lie between neighboring cells and around all of them."""

    columns: int = Field(ge=1)
    gap: int = Field(default=0, ge=0)
    items: tuple[GridCell, ...]


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """The reward of one held-out sample, and its parts."""

    prompt: str
    reward: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SampleGrid:
    """A grid and its captions, row by row; None if their file is missing."""

    image: Path
    captions: GridCaptions | None


def write_grid(folder: RunFolder, steps_done: int, pictures: Path, scores: Sequence[HeldOutScore]) -> Path:
    """Replaces a folder of single pictures by the grid, its captions and clips; returns the grid's path."""
    from PIL import Image

    images = [Image.open(path).convert("RGB") for path in sorted(pictures.glob("*.png"))]
    columns = columns_for(len(images))
    target = folder.grid(steps_done)
    write_png(side_by_side(images, columns), target)
    cells = tuple(
        GridCell(prompt=score.prompt, reward=_finite(score.reward), parts=_finite_parts(score.parts))
        for score in scores[: len(images)]
    )
    captions = GridCaptions(columns=columns, gap=GAP, items=cells)
    write_atomically(folder.grid_captions(steps_done), captions.model_dump_json(indent=1))
    for clip in pictures.glob("*.mp4"):
        clip.replace(clip_of(target, int(clip.stem)))
    shutil.rmtree(pictures)
    return target


def write_source_grid(folder: RunFolder, images: Sequence[Image.Image]) -> None:
    """Writes the source images of held-out prompts, which have the size of their samples."""
    write_png(side_by_side(images, columns_for(len(images))), folder.source_grid)


def write_png(image: Image.Image, path: Path) -> None:
    """Writes an image to a file, completely or not at all."""
    encoded = io.BytesIO()
    image.save(encoded, format="PNG")
    write_atomically(path, encoded.getvalue())


def read_grid(image: Path) -> SampleGrid | None:
    """The grid at this path with its captions; None if the image is missing."""
    if not image.is_file():
        return None
    captions = image.with_suffix(".json")
    return SampleGrid(image, read_model(GridCaptions, captions) if captions.is_file() else None)


def clip_of(grid: Path, cell: int) -> Path:
    """The clip of a cell of this grid, which exists for videos only."""
    return grid.with_name(f"{grid.stem}_{cell:04d}.mp4")


def columns_for(count: int) -> int:
    """About as many columns as rows, at most 8.

    >>> [columns_for(count) for count in (1, 2, 3, 4, 9, 16, 40, 64, 500)]
    [1, 1, 1, 2, 3, 4, 6, 8, 8]
    """
    return max(1, min(8, int(count**0.5)))


def side_by_side(images: Sequence[Image.Image], columns: int) -> Image.Image:
    """All images, row by row; they have the same size."""
    from PIL import Image

    width, height = images[0].size
    rows = -(-len(images) // columns)
    grid = Image.new("RGB", (columns * (width + GAP) + GAP, rows * (height + GAP) + GAP), BACKGROUND)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        grid.paste(image, (GAP + column * (width + GAP), GAP + row * (height + GAP)))
    return grid


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _finite_parts(parts: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in parts.items()}
