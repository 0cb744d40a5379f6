"""The on-disk format of a checkpoint, for everyone who reads one. Does not import torch.

A folder `step_000010` (10 optimizer steps done) holds the trainer's tensors in safetensors files, one per kind,
and `state.json` with everything else: the run's facts, and the size and checksum of every file. Checkpoints of a
sharded trainer have a folder per kind, with one file per rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from digenrl.checksums import file_checksum
from digenrl.config.reading import ConfigError, one_line

WHOLE, SHARDED = 3, 4  # format numbers
STATE_FILE = "state.json"
BASE_WEIGHTS = "base_weights"  # the fact that names the weights that training started from
FOLDER_NAME = re.compile(r"step_(\d{6,})")

FileRecords = dict[str, Mapping[str, Any]]
"""Size and checksum of files, by name."""


class CheckpointError(ConfigError):
    """A checkpoint that could not be written or cannot be used; the message is one line."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is incomplete or was changed; an older one may be whole."""


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """The content of `state.json`. `trainer` is the trainer's state without its tensors."""

    format: int
    step: int
    trainer: dict[str, Any]
    facts: dict[str, Any]
    files: FileRecords

    def write(self, folder: Path) -> None:
        """Writes `state.json`; it makes the folder a checkpoint, so all files it lists must exist."""
        content = asdict(self) | {"files": dict(sorted(self.files.items()))}
        text = json.dumps(content | {"checksum": _digest(content)}, indent=1)
        (folder / STATE_FILE).write_text(text, encoding="utf-8")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """All checkpoints in a folder, in the order of their steps."""
    named = [(FOLDER_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match and path.is_dir())]


def read_content(path: Path) -> CheckpointContent:
    """Reads `state.json` and verifies its format and its own checksum, not those of the other files."""
    if not (path / STATE_FILE).is_file():
        inside = checkpoints_in(path)
        hint = f"did you mean {inside[-1]}?" if inside else last_good(path.parent, other_than=path)
        what = f"not a checkpoint, it has no {STATE_FILE}" if path.is_dir() else "there is no such checkpoint"
        raise DamagedCheckpointError(f"{path}: {what}; {hint}")
    try:
        content = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, f"{STATE_FILE} cannot be read: {reason_of(error)}") from None
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path}: {STATE_FILE} is not from a DigenRL checkpoint: it has no format number")
    if content["format"] not in (WHOLE, SHARDED):
        raise CheckpointError(
            f"{path}: has format {content['format']!r}, known: {WHOLE}, {SHARDED}; "
            "resume with the version of DigenRL that wrote it"
        )
    checksum = content.pop("checksum", None)
    if checksum != _digest(content):
        raise damaged(path, f"{STATE_FILE} does not match its checksum")
    return CheckpointContent(**content)


def check_file(path: Path, name: str, record: Mapping[str, Any]) -> None:
    """Raises DamagedCheckpointError unless a file of the checkpoint has the size and checksum of its record."""
    file = path / name
    if not file.is_file():
        raise damaged(path, f"{name} is missing")
    try:
        size = file.stat().st_size
        checksum = file_checksum(file) if size == record["bytes"] else None
    except OSError as error:
        raise damaged(path, f"{name} cannot be read: {reason_of(error)}") from None
    if size != record["bytes"]:
        raise damaged(path, f"{name} has {size} bytes, expected {record['bytes']}")
    if checksum != record["checksum"]:
        raise damaged(path, f"{name} does not match its checksum")


def damaged(path: Path, what: str) -> DamagedCheckpointError:
    """An error that names the damage and the next older checkpoint."""
    return DamagedCheckpointError(f"{path}: is damaged: {what}; {last_good(path.parent, other_than=path)}")


def last_good(folder: Path, other_than: Path | None = None) -> str:
    """A phrase that names the newest other checkpoint."""
    others = [path for path in checkpoints_in(folder) if path != other_than]
    return f"the last good checkpoint is {others[-1]}" if others else "there is no other checkpoint"


def reason_of(error: Exception) -> str:
    """The reason for a failed file operation, in a few words."""
    text = getattr(error, "strerror", None) or one_line(error)
    return str(text).removeprefix("Error while serializing: I/O error: ")


def _digest(content: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
