"""Where a run that goes on begins: its newest checkpoint, if it is whole and of this very run. No torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.config.recipe_files import fingerprint
from digenrl.runs.folder import RunFolder
from digenrl.runs.keeping import Bookmark

NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class Standing:
    """A checkpoint and the bookmark that lies in it."""

    checkpoint: Path
    bookmark: Bookmark


def find_standing(folder: RunFolder) -> Standing | None:
    """The newest checkpoint; None for a run that was stopped before its first, and begins again."""
    steps = {int(found[1]): path for path in folder.checkpoints.iterdir() if (found := NAME.fullmatch(path.name))}
    if not steps:
        return None
    path = steps[max(steps)]
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        facts, step = content["facts"], content["step"]
        bookmark = Bookmark(step, facts["at_ns"], facts["leases_issued"], facts["positions"])
        owner = facts["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: incomplete or damaged ({type(error).__name__}); remove it to go on from the one before"
        ) from None
    if owner != fingerprint(folder.recipe):
        raise ConfigError(
            f"{path}: was saved by another run: seed, model, prompts, rewards, batch, algorithm or training differ "
            f"from {folder.config}; resume in its own folder, or start a new run"
        )
    return Standing(path, bookmark)
