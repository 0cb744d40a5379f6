"""The image grids of a run and the clips of its videos, embedded in the page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from digenrl.config.reading import ConfigError
from digenrl.run_folder.grids import SampleGrid, clip_of
from digenrl.run_folder.metric_lines import EvaluationRecord
from digenrl.run_folder.reading import RunRecord

_MOST_GRIDS = 24
_MOST_BYTES = 24_000_000


def grids(run: RunRecord) -> dict[str, Any]:
    """The grids of the first, the last, and evenly spaced evaluations between them, all with the same settings.

    `written` counts all such grids: where it exceeds the number shown, the page says so. `others` counts the
    evaluations with other settings. `sources` is the grid of source images, in runs that edit images.
    """
    alike = run.comparable_evaluations
    with_grid = [(each, run.grids[each.steps_done]) for each in alike if each.steps_done in run.grids]
    sizes = [sum(file.stat().st_size for file in (grid.image, *_clips(grid))) for _, grid in with_grid]
    chosen = choose_evenly(sizes, _MOST_GRIDS, _MOST_BYTES)
    sources = run.folder.source_grid
    return {
        "written": len(with_grid),
        "others": len(run.evaluations) - len(alike),
        "shown": [_entry(*with_grid[number]) for number in chosen],
        "sources": _data_url(sources, "image/png") if sources.is_file() else None,
    }


def choose_evenly(sizes: Sequence[int], most: int, most_bytes: int) -> tuple[int, ...]:
    """As many evenly spaced indices as fit both limits; always the first and the last.

    >>> choose_evenly([10] * 9, most=3, most_bytes=1000)
    (0, 4, 8)
    """
    count = len(sizes)
    for wanted in range(min(count, most), 2, -1):
        chosen = tuple(round(place * (count - 1) / (wanted - 1)) for place in range(wanted))
        if sum(sizes[number] for number in chosen) <= most_bytes:
            return chosen
    return tuple(sorted({0, count - 1})) if count else ()


def _entry(evaluation: EvaluationRecord, grid: SampleGrid) -> dict[str, Any]:
    captions = grid.captions
    return {
        "step": evaluation.steps_done,
        "reward": evaluation.values.get("reward_mean"),
        "image": _data_url(grid.image, "image/png"),
        "columns": 1 if captions is None else captions.columns,
        "gap": 0 if captions is None else captions.gap,
        "cells": [
            {
                "prompt": cell.prompt,
                "reward": cell.reward,
                "parts": cell.known_parts(),
                "clip": _data_url(clip, "video/mp4") if (clip := clip_of(grid.image, number)).is_file() else None,
            }
            for number, cell in enumerate(() if captions is None else captions.items)
        ],
    }


def _clips(grid: SampleGrid) -> list[Path]:
    cells = range(0 if grid.captions is None else len(grid.captions.items))
    return [clip for cell in cells if (clip := clip_of(grid.image, cell)).is_file()]


def _data_url(file: Path, kind: str) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
