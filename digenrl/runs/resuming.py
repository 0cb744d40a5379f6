"""Where a run that goes on begins: its newest checkpoint, if it is whole and of this very run. No torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.config.recipe_files import fingerprint
from digenrl.run_folder.folder import RunFolder
from digenrl.runs.checkpointer import RunPosition
from digenrl.training.checkpoint.format import newest_checkpoint, read_content


@dataclass(frozen=True, slots=True)
class Standing:
    """A checkpoint and the bookmark that lies in it."""

    checkpoint: Path
    bookmark: RunPosition


def find_resume_point(folder: RunFolder) -> Standing | None:
    """The newest checkpoint; None for a run that was stopped before its first, and begins again."""
    path = newest_checkpoint(folder.checkpoints)
    if path is None:
        return None
    content = read_content(path)
    try:
        facts = content.facts
        bookmark = RunPosition(content.step, facts["at_ns"], facts["leases_issued"], facts["positions"])
        owner = facts["fingerprint"]
    except KeyError as error:
        raise ConfigError(f"{path}: was not saved by a run: it lacks {error.args[0]}") from None
    if owner != fingerprint(folder.recipe):
        raise ConfigError(
            f"{path}: was saved by another run: seed, model, prompts, rewards, batch, algorithm or training "
            f"differ from {folder.config}; resume in its own folder, or start a new run"
        )
    return Standing(path, bookmark)


def kept_positions(folder: RunFolder, bookmark: RunPosition) -> dict[str, int]:
    """How long the growing files stay when a run goes on from a bookmark.

    Evaluations come later than the commit of the version that they are of: those of versions up to the bookmark's
    hold, wherever they stand in the file.
    """
    end = bookmark.positions.get("evaluations", 0)
    with folder.evaluations.open("rb") as file:
        file.seek(end)
        for line in file:
            if not line.endswith(b"\n") or _step_of(line) > bookmark.step:
                break
            end += len(line)
    return {**bookmark.positions, "evaluations": end}


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # not ours: cutting the file back complains about it, or removes it
