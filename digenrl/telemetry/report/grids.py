"""The pictures of a run, packed into the page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from digenrl.config.reading import ConfigError
from digenrl.telemetry.report.records import Evaluation, SampleGrid

_MOST_GRIDS = 24
_MOST_BYTES = 24_000_000


def grids(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The first, the last and evenly chosen evaluations between, each with its picture.

    `written` counts all that have one: where it is above the number shown, the page says so.
    """
    with_grid = [(one, one.grid) for one in evaluations if one.grid is not None]
    sizes = [grid.image.stat().st_size for _, grid in with_grid]
    chosen = choose_evenly(sizes, _MOST_GRIDS, _MOST_BYTES)
    return {"written": len(with_grid), "shown": [_entry(*with_grid[number]) for number in chosen]}


def choose_evenly(sizes: Sequence[int], most: int, most_bytes: int) -> tuple[int, ...]:
    """As many evenly spaced positions as fit both limits; the first and the last always.

    >>> choose_evenly([10] * 9, most=3, most_bytes=1000)
    (0, 4, 8)
    """
    count = len(sizes)
    for wanted in range(min(count, most), 2, -1):
        chosen = tuple(round(place * (count - 1) / (wanted - 1)) for place in range(wanted))
        if sum(sizes[number] for number in chosen) <= most_bytes:
            return chosen
    return tuple(sorted({0, count - 1})) if count else ()


def _entry(evaluation: Evaluation, grid: SampleGrid) -> dict[str, Any]:
    return {
        "step": evaluation.step,
        "reward": evaluation.values.get("reward_mean"),
        "image": _data_address(grid),
        "columns": grid.columns,
        "gap": grid.gap,
        "cells": [
            {"prompt": cell.prompt, "reward": cell.reward, "parts": dict(cell.parts)} for cell in grid.cells
        ],
    }


def _data_address(grid: SampleGrid) -> str:
    try:
        content = grid.image.read_bytes()
    except OSError as error:
        raise ConfigError(f"{grid.image}: cannot be read: {error.strerror or error}") from None
    return f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
