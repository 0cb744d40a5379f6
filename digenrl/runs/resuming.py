"""Where a run that goes on begins: its newest checkpoint, if it is whole and of this very run. No torch."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.config.recipe_files import fingerprint
from digenrl.run_folder.folder import RunFolder
from digenrl.runs.checkpointer import RunPosition

NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint and the bookmark that lies in it."""

    checkpoint: Path
    position: RunPosition


def find_resume_point(folder: RunFolder) -> ResumePoint | None:
    """The newest checkpoint; None for a run that was stopped before its first, and begins again."""
    inside = list(folder.checkpoints.iterdir()) if folder.checkpoints.is_dir() else []
    steps = {int(found[1]): path for path in inside if (found := NAME.fullmatch(path.name))}
    if not steps:
        return None
    path = steps[max(steps)]
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        facts, step = content["facts"], content["step"]
        bookmark = RunPosition(step, facts["at_ns"], facts["jobs_issued"], facts["positions"])
        owner = facts["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: incomplete or damaged ({type(error).__name__}); remove it to go on from the one before"
        ) from None
    if owner != fingerprint(folder.recipe):
        raise ConfigError(
            f"{path}: was saved by another run: seed, model, prompts, rewards, batch, algorithm or training "
            f"differ from {folder.config}; resume in its own folder, or start a new run"
        )
    return ResumePoint(path, bookmark)


def kept_positions(folder: RunFolder, position: RunPosition) -> dict[str, int]:
    """How long the growing files stay when a run goes on from a bookmark.

    Evaluations come later than the commit of the version that they are of: those of versions up to the bookmark's
    hold, wherever they stand in the file.
    """
    end = position.positions.get("evaluations", 0)
    with folder.evaluations.open("rb") as file:
        file.seek(end)
        for line in file:
            if not line.endswith(b"\n") or _step_of(line) > position.step:
                break
            end += len(line)
    return {**position.positions, "evaluations": end}


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # not ours: cutting the file back complains about it, or removes it
