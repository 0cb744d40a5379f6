"""Runs of a tiny model that edits images."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from live_runs import TINY, LiveRuns
from source_pictures import picture

from digenrl.testing.tiny_models import make_tiny_pipeline

# Scores tell which source a reward has seen: the mean of its pixels.
EDITS = {
    **TINY,
    "model": {"family": "flux_kontext", "source": "model", "guidance": 2.5, "text_tokens": 16},
    "prompts": {"path": "edits.jsonl"},
    "rewards": "live_rewards:closeness",
    "sample": {"height": 32, "width": 32, "denoising_steps": 3},
    "batch": {"prompts": 2, "samples_per_prompt": 2, "slice": 2},
    "steps": 2,
    "evaluation": {
        "prompts": {"path": "edits.jsonl"},
        "every": 1,
        "denoising_steps": 2,
        "count": 3,
        "height": 32,
        "width": 48,
    },
    "checkpoint": {"every": 1, "keep": 3},
}


class EditRuns(LiveRuns):
    def __init__(self, root: Path) -> None:
        self.root, self._finished, self._count = root, {}, 0
        make_tiny_pipeline("flux_kontext", root / "model")
        lines = []
        for index, (height, width) in enumerate([(40, 40), (40, 64), (32, 32)]):
            picture(index, height, width).save(root / f"source-{index}.png")
            lines.append(json.dumps({"prompt": f"make it red {index}", "image": f"source-{index}.png"}))
        (root / "edits.jsonl").write_text("\n".join(lines) + "\n")
        (root / "tiny.yaml").write_text(yaml.safe_dump(EDITS))
