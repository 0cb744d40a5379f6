"""Handmade run folders: small, with known values, and samples of plain colors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from handmade_traces import on_policy_trace
from PIL import Image

from digenrl.config.recipes.recipe import Recipe
from digenrl.run_folder.folder import FORMAT
from digenrl.telemetry.trace import Span, Trace

CELL_PIXELS = 8
GAP_PIXELS = 2
# The four cells of a grid, row by row; those of the second evaluation are brighter.
BEFORE_COLORS = ((120, 0, 0), (0, 120, 0), (0, 0, 120), (60, 60, 60))
AFTER_COLORS = ((250, 0, 0), (0, 250, 0), (0, 0, 250), (200, 200, 200))
NASTY_PROMPT = 'a sign that says "</script><img src=x onerror=alert(1)>" & <!-- more'
PROMPTS = ("a sign that says 12", NASTY_PROMPT, "a sign that says 56", "a sign that says 78")


def recipe(**changes: Any) -> Recipe:
    """A valid recipe; `changes` replace its top-level keys."""
    content: dict[str, Any] = {
        "name": "handmade",
        "steps": 2,
        "model": {"family": "sd3", "source": "demo"},
        "prompts": {"path": "/prompts/train.txt"},
        "rewards": ["ocr"],
        "sample": {"height": 64, "width": 64},
        "batch": {"prompts": 2, "samples_per_prompt": 2},
        "algorithm": {"name": "flow_grpo"},
        "training": {"lora": {"rank": 8}},
        "techniques": {"tag": "none", "tcss": 0.25},
    }
    return Recipe.model_validate({**content, **changes})


def both_recipe() -> Recipe:
    """The same recipe with help in both directions."""
    algorithm = {"name": "flow_grpo", "options": {"updates_per_batch": 1}}
    return recipe(algorithm=algorithm, techniques={"assist": "both"})


def metrics_rows(steps: int = 2) -> list[dict[str, float]]:
    """Rewards rise from 0.25 by 0.25 per step; steps take 10 s and are predicted 10 % too long."""
    return [
        {
            "step": step,
            "at_s": 10.0 * (step + 1),
            "step_s": 10.0,
            "predicted_step_s": 11.0,
            "reward_mean": 0.25 + 0.25 * step,
            "reward_std": 0.1,
            "reward/ocr": 0.25 + 0.25 * step,
            "gradient_norm": 0.5,
            "samples": 4,
            "samples_per_s": 0.4,
            "stale_share": 0.25 * step,
            "helped_share": 0.0,
            "my_own_metric": 7.0,
        }
        for step in range(steps)
    ]


def evaluation_rows() -> list[dict[str, Any]]:
    """Evaluations before the first and after the second step."""
    return [
        {
            "step": step,
            "at_s": 10.0 * step,
            "count": 4,
            "reward_mean": reward,
            "reward/ocr.exact": exact,
            "grid": f"samples/step_{step:06d}.png",
        }
        for step, reward, exact in ((0, 0.2, 0.0), (2, 0.8, 0.75))
    ]


def write_run(
    folder: Path,
    *,
    trace: Trace | None = None,
    metrics: Iterable[Mapping[str, Any]] | None = None,
    evaluations: Iterable[Mapping[str, Any]] | None = None,
    status: str = "finished",
    settings: Recipe | None = None,
) -> Path:
    """Writes a complete run folder; the default trace is the worked example of two steps."""
    trace = trace or on_policy_trace()
    folder.mkdir(parents=True, exist_ok=True)
    resolved = (settings or recipe()).model_dump(mode="json")
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False), encoding="utf-8")
    about = {
        "format": FORMAT,
        "name": "handmade",
        "digenrl": "0.0.0",
        "started": "2026-01-02T03:04:05+00:00",
        "lanes": [{"name": lane.name, "pool": lane.pool, "device": "cpu"} for lane in trace.lanes],
        "status": status,
        "initial_state": {"slice": 1},
    }
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    write_lines(folder / "spans.jsonl", map(span_row, trace.spans))
    write_lines(folder / "metrics.jsonl", metrics_rows() if metrics is None else metrics)
    write_lines(folder / "evaluations.jsonl", evaluation_rows() if evaluations is None else evaluations)
    write_grid(folder, 0, BEFORE_COLORS, rewards=(0.0, 0.25, 0.25, 0.3))
    write_grid(folder, 2, AFTER_COLORS, rewards=(1.0, 0.75, 0.75, 0.7))
    return folder


def span_row(span: Span) -> dict[str, Any]:
    """A span as a line of spans.jsonl."""
    return {**asdict(span), "work": span.work.value}


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object per line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def write_grid(
    folder: Path, step: int, colors: tuple[tuple[int, int, int], ...], rewards: tuple[float, ...]
) -> None:
    """Writes a grid of two columns, each cell of one color, and its captions."""
    samples = folder / "samples"
    samples.mkdir(exist_ok=True)
    pitch = CELL_PIXELS + GAP_PIXELS
    picture = Image.new("RGB", (2 * pitch + GAP_PIXELS, 2 * pitch + GAP_PIXELS))
    for place, color in enumerate(colors):
        corner = (GAP_PIXELS + place % 2 * pitch, GAP_PIXELS + place // 2 * pitch)
        picture.paste(Image.new("RGB", (CELL_PIXELS, CELL_PIXELS), color), corner)
    picture.save(samples / f"step_{step:06d}.png")
    items = [
        {"prompt": prompt, "reward": reward, "parts": {"ocr.exact": float(reward == 1)}}
        for prompt, reward in zip(PROMPTS, rewards, strict=True)
    ]
    text = json.dumps({"columns": 2, "gap": GAP_PIXELS, "items": items})
    (samples / f"step_{step:06d}.json").write_text(text, encoding="utf-8")
