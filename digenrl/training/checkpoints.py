"""Checkpoints of a trainer: complete or absent, checked when they are read, nothing pickled.

A folder `step_000010` (10 optimizer steps done) holds the tensors of the trainer's state in safetensors files, by
the names of parameters, and `state.json` with everything else and the size and checksum of every file. The frozen
reference of full fine-tuning never changes: a new checkpoint shares the file of an older one by a hard link, where
the file system has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.training.whole_folders import remove_whole, restore, tidy, written_whole

FORMAT = 1
STATE = "state.json"
REFERENCE = "reference.safetensors"
FILES: dict[str, tuple[str, ...]] = {  # where in a trainer's state the tensors of a file stand
    "weights.safetensors": ("policies", "current"),
    "old_policy.safetensors": ("policies", "old"),
    REFERENCE: ("policies", "reference"),
    "average.safetensors": ("ema",),
    "optimizer.safetensors": ("optimizer",),
}
NAME = re.compile(r"step_(\d{6,})")


class CheckpointError(ConfigError):
    """A checkpoint that could not be written or is not to be used, told in one line."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was saved after so many optimizer steps. `facts` are as JSON gives them back: lists, no tuples."""

    step: int
    trainer_state: dict[str, Any]
    facts: dict[str, Any]


def save_checkpoint(
    folder: Path,
    step: int,
    trainer_state: Mapping[str, Any],
    facts: Mapping[str, Any],
    export: Callable[[Path], None] | None = None,
) -> Path:
    """Writes folder/step_NNNNNN and returns it; one of the same step is replaced.

    `facts` are for JSON; "fingerprint" among them says whose checkpoint it is. `export` may write more into the
    folder that it is given. If anything goes wrong, nothing of it is left and older checkpoints are as they were.
    """
    target = folder / f"step_{step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tidy(folder)
        with written_whole(target) as partial:
            known = _write_tensors(partial, trainer_state, checkpoints_in(folder))
            if export is not None:
                export(partial)
            content = {
                "format": FORMAT,
                "step": step,
                "trainer": _without_tensors(trainer_state),
                "facts": dict(facts),
                "files": _records_of(partial, known),
            }
            text = json.dumps(content | {"checksum": fingerprint_of(content)}, indent=1)
            (partial / STATE).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(f"{target}: could not be saved: {reason_of(error)}; {_last_good(folder)}") from error
    return target


def read_checkpoint(path: Path, fingerprint: str | None = None) -> Checkpoint:
    """The checkpoint in this folder, once every file has the size and checksum that were written down.

    With a `fingerprint`, one whose facts name another is refused.
    """
    content = _read_state(path)
    found = content["facts"].get("fingerprint")
    if fingerprint is not None and found != fingerprint:
        raise CheckpointError(
            f"{path}: was made with another recipe (fingerprint {found}, this one has {fingerprint}); resume with "
            "the recipe it was made with, or start a new run"
        )
    for name, record in content["files"].items():
        _check_file(path, name, record)
    state = content["trainer"]
    for name in content["files"].keys() & FILES.keys():
        _put(state, FILES[name], load_file(path / name))
    return Checkpoint(content["step"], state, content["facts"])


def latest_checkpoint(folder: Path) -> Path | None:
    """The one of most steps; None where there is none, or no such folder."""
    if not folder.is_dir():
        return None
    restore(folder)
    found = checkpoints_in(folder)
    return found[-1] if found else None


def prune_checkpoints(folder: Path, keep: int, just_written: Path | None = None) -> None:
    """Removes all but the `keep` of most steps, and never the one just written."""
    assert keep >= 1, f"at least one checkpoint is kept, got {keep}"
    try:
        for path in checkpoints_in(folder)[:-keep]:
            if path != just_written:
                remove_whole(path)
    except OSError as error:
        raise CheckpointError(f"{folder}: an old checkpoint cannot be removed: {reason_of(error)}") from error


def checkpoints_in(folder: Path) -> list[Path]:
    """All checkpoints of a folder, in the order of their steps."""
    named = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match and path.is_dir())]


def fingerprint_of(content: Mapping[str, Any]) -> str:
    """Differs where anything differs in what JSON can hold; the order of keys does not count."""
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def reason_of(error: Exception) -> str:
    """What went wrong with a file, in few words."""
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return str(text).removeprefix("Error while serializing: I/O error: ")


# --- Writing --------------------------------------------------------------------------------------------------


def _write_tensors(
    partial: Path, trainer_state: Mapping[str, Any], older: list[Path]
) -> dict[str, Mapping[str, Any]]:
    """Writes all tensor files; returns the records of those whose checksum is known already."""
    tensors = _tensors_in(trainer_state)
    known: dict[str, Mapping[str, Any]] = {}
    for name, place in FILES.items():
        prefix = "".join(f"{key}/" for key in place)
        part = {path.removeprefix(prefix): tensors.pop(path) for path in list(tensors) if path.startswith(prefix)}
        if not part:
            continue
        if name == REFERENCE:
            known[name] = _share_or_write(partial / name, part, older)
        else:
            save_file(part, partial / name)
    assert not tensors, f"a trainer's state holds tensors that have no file: {sorted(tensors)[:3]}"
    return known


def _share_or_write(path: Path, tensors: Mapping[str, Tensor], older: list[Path]) -> dict[str, Any]:
    """The record of a file that one of the older checkpoints may have already."""
    content = _content_of(tensors)
    for checkpoint in reversed(older):
        try:
            record: dict[str, Any] = _read_state(checkpoint)["files"].get(path.name, {})
            if record.get("content") == content and (checkpoint / path.name).stat().st_size == record["bytes"]:
                path.hardlink_to(checkpoint / path.name)
                return record
        except (OSError, CheckpointError):
            continue  # no hard links here, or that one is damaged: the file is written once more
    save_file(dict(tensors), path)
    return _record_of(path) | {"content": content}


def _records_of(partial: Path, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    names = [path.relative_to(partial).as_posix() for path in files]
    return {name: known.get(name) or _record_of(path) for name, path in zip(names, files, strict=True)}


def _record_of(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "blake2b": file_digest(file, blake2b).hexdigest()}


def _content_of(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of names, types, shapes and values."""
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors_in(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of the tree under its path, keys joined by slashes."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        assert "/" not in key, f"a slash in the name {key!r} would break its path"
        if isinstance(value, Tensor):
            found[prefix + key] = value.contiguous()
        elif isinstance(value, Mapping):
            found |= _tensors_in(value, f"{prefix}{key}/")
    return found


def _without_tensors(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_tensors(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if not isinstance(value, Tensor)
    }


# --- Reading --------------------------------------------------------------------------------------------------


def _read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint, once it is known to be ours and unharmed."""
    inside = [checkpoint.name for checkpoint in checkpoints_in(path)]
    if not (path / STATE).is_file():
        hint = f"; did you mean {path / inside[-1]}?" if inside else f"; {_last_good(path.parent, path)}"
        what = "not a checkpoint, it has no state.json" if path.is_dir() else "there is no such checkpoint"
        raise CheckpointError(f"{path}: {what}{hint}")
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, f"{STATE} cannot be read: {reason_of(error)}") from None
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path}: {STATE} is not of a DigenRL checkpoint: it names no format")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: is of format {content['format']!r}, known: {FORMAT}; "
            "resume with the version of DigenRL that wrote it"
        )
    checksum = content.pop("checksum", None)
    if checksum != fingerprint_of(content):
        raise _damaged(path, f"{STATE} does not match its checksum")
    return content


def _check_file(path: Path, name: str, record: Mapping[str, Any]) -> None:
    file = path / name
    if not file.is_file():
        raise _damaged(path, f"{name} is missing")
    try:
        size = file.stat().st_size
        checksum = _record_of(file)["blake2b"] if size == record["bytes"] else None
    except OSError as error:
        raise _damaged(path, f"{name} cannot be read: {reason_of(error)}") from None
    if size != record["bytes"]:
        raise _damaged(path, f"{name} has {size} bytes, expected {record['bytes']}")
    if checksum != record["blake2b"]:
        raise _damaged(path, f"{name} does not match its checksum")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: is damaged: {what}; {_last_good(path.parent, path)}")


def _last_good(folder: Path, but: Path | None = None) -> str:
    others = [path for path in checkpoints_in(folder) if path != but]
    return f"the last good checkpoint is {others[-1]}" if others else "there is no other checkpoint"


def _put(state: dict[str, Any], place: tuple[str, ...], tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        *way, last = (*place, *name.split("/"))
        inside = state
        for key in way:
            inside = inside[key]
        inside[last] = value
