"""A recipe for tests that build no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from digenrl.config.reading import parse_model
from digenrl.config.recipes.recipe import Recipe

RECIPE: dict[str, Any] = {
    "steps": 3,
    "model": {"family": "sd3", "source": "nowhere"},
    "prompts": {"path": "prompts.txt"},
    "rewards": "jpeg_compressibility",
    "sample": {"height": 16, "width": 16},
    "batch": {"prompts": 3, "samples_per_prompt": 4, "slice": 2},
    "algorithm": {"name": "flow_grpo"},
    "lanes": {"generators": ["cpu", "cpu"]},
}


def fake_recipe(**changes: Any) -> Recipe:
    """RECIPE with some of its keys changed; mappings are merged."""
    content = dict(RECIPE)
    for key, value in changes.items():
        content[key] = {**content.get(key, {}), **value} if isinstance(value, Mapping) else value
    return parse_model(Recipe, content)
