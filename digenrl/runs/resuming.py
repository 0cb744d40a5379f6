"""Where a run resumes: its newest checkpoint, if that is complete and belongs to this run. No torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.config.recipe_files import fingerprint
from digenrl.run_folder.folder import RunFolder
from digenrl.run_folder.metric_lines import end_of_evaluations
from digenrl.runs.checkpointer import RunPosition

NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint, and the position of the run when it was saved."""

    checkpoint: Path
    position: RunPosition


def find_resume_point(folder: RunFolder) -> ResumePoint | None:
    """The newest checkpoint; None for a run that stopped before its first and has to start over."""
    inside = list(folder.checkpoints.iterdir()) if folder.checkpoints.is_dir() else []
    steps = {int(found[1]): path for path in inside if (found := NAME.fullmatch(path.name))}
    if not steps:
        return None
    path = steps[max(steps)]
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        facts, step = content["facts"], content["step"]
        position = RunPosition(step, facts["at_ns"], facts["jobs_issued"], facts["positions"])
        owner = facts["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: incomplete or damaged ({type(error).__name__}); remove it to resume from the previous one"
        ) from None
    if owner != fingerprint(folder.recipe):
        raise ConfigError(
            f"{path}: was saved by another run: seed, model, prompts, rewards, batch, algorithm or training "
            f"differ from {folder.config}; resume in its own folder, or start a new run"
        )
    return ResumePoint(path, position)


def kept_positions(folder: RunFolder, position: RunPosition) -> dict[str, int]:
    """The sizes to which a resumed run truncates its JSON-lines files."""
    end = end_of_evaluations(folder.evaluations, position.positions.get("evaluations", 0), position.step)
    return {**position.positions, "evaluations": end}
