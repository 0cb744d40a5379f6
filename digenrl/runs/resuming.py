"""Where a run resumes: its newest checkpoint, if that is complete and belongs to this run. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.config.recipe_files import fingerprint
from digenrl.run_folder.folder import RunFolder
from digenrl.run_folder.metric_lines import end_of_evaluations
from digenrl.runs.checkpointer import RunPosition
from digenrl.training.checkpoint.format import newest_checkpoint, read_content


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint, and the position of the run when it was saved."""

    checkpoint: Path
    position: RunPosition


def find_resume_point(folder: RunFolder) -> ResumePoint | None:
    """The newest checkpoint; None for a run that stopped before its first and has to start over."""
    path = newest_checkpoint(folder.checkpoints)
    if path is None:
        return None
    content = read_content(path)
    try:
        facts = content.facts
        position = RunPosition(content.step, facts["at_ns"], facts["jobs_issued"], facts["positions"])
        owner = facts["fingerprint"]
    except KeyError as error:
        raise ConfigError(
            f"{path}: lacks {error.args[0]}; resume with the version of DigenRL that wrote it"
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
