"""Checkpoints of a trainer: complete or absent, checked when they are read, nothing pickled.

A folder `step_000010` (10 optimizer steps done) holds the tensors of the trainer's state in safetensors files, by
the names of parameters, and `state.json` with everything else and the size and checksum of every file. Of a
sharded trainer there is a folder of parts in place of each file, and every rank writes its own; any number of
ranks, or one process, can read them. The frozen reference of full fine-tuning never changes: a new checkpoint
shares the files of an older one by hard links, where the file system has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl.checksums import file_checksum, tensors_checksum
from digenrl.config.reading import ConfigError
from digenrl.training.checkpoint.atomic_folders import (
    partial_of,
    remove_atomically,
    restore,
    tidy,
    written_atomically,
)
from digenrl.training.checkpoint.part_files import part_name, read_parts, read_rows, write_parts
from digenrl.training.checkpoint.state_trees import put_tensors, tensors_in, without_tensors
from digenrl.training.ranks.rank_group import RankGroup, RanksError, together
from digenrl.training.ranks.sharding import ShardSpec

WHOLE, PARTS = 3, 4  # formats: one file for each of the kinds below, or a folder with a part of every rank
STATE = "state.json"
KINDS = {  # where in a trainer's state the tensors of each kind stand
    "weights": "policies/current/",
    "old_policy": "policies/old/",
    "reference": "policies/reference/",
    "average": "ema/",
    "optimizer": "optimizer/",
}
SHARED = "reference"  # the kind that never changes
NAME = re.compile(r"step_(\d{6,})")
Records = dict[str, Mapping[str, Any]]  # of files by name: size and checksum


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
    ranks: RankGroup | None = None,
) -> Path:
    """Writes folder/step_NNNNNN and returns it; one of the same step is replaced.

    `facts` are for JSON; "fingerprint" among them says whose checkpoint it is. `export` may write more into the
    folder that it is given. If anything goes wrong, nothing of it is left and older checkpoints are as they were.
    All `ranks` call it with their own state and see the same folder. The first writes, or each its parts of a
    sharded state; it is saved for all of them, or raises on all.
    """
    target, first = folder / f"step_{step:06d}", ranks is None or ranks.first
    tensors, shard = _by_kind(trainer_state), trainer_state.get("shard")
    assert shard is None or ranks is not None, "parts of a state are saved by all ranks together"
    try:
        with ExitStack() as opened:
            with together(ranks):
                if first:
                    folder.mkdir(parents=True, exist_ok=True)
                    tidy(folder)
                    opened.enter_context(written_atomically(target))
            records: Records = {}
            if shard is not None and ranks is not None:
                records = _write_parts(partial_of(target), tensors, ShardSpec.of_facts(shard), ranks)
            with together(ranks):
                if first:
                    records = records or _write_whole(partial_of(target), tensors)
                    if export is not None:
                        export(partial_of(target))
                    _write_state(partial_of(target), step, trainer_state, facts, records)
                    opened.close()
    except (OSError, SafetensorError, CheckpointError, RanksError) as error:
        raise CheckpointError(f"{target}: could not be saved: {reason_of(error)}; {_last_good(folder)}") from error
    return target


def read_checkpoint(
    path: Path, fingerprint: str | None = None, cut: ShardSpec | None = None, ranks: RankGroup | None = None
) -> Checkpoint:
    """The checkpoint in this folder, once every file has the size and checksum that were written down.

    With a `fingerprint`, one whose facts name another is refused. Without `ranks` it is read whole. They share the
    work of checking, all call it, and it is read by all or raises on all; with a `cut` each reads its parts alone.
    """
    try:
        with together(ranks):
            content = _read_state(path)
            _check_fingerprint(path, content["facts"].get("fingerprint"), fingerprint)
            for index, (name, record) in enumerate(sorted(content["files"].items())):
                if ranks is None or index % ranks.count == ranks.index:
                    _check_file(path, name, record)
    except RanksError as error:
        raise CheckpointError(f"{path}: cannot be read by all ranks: {error}") from error
    state = content["trainer"] | {"shard": None if cut is None else cut.facts()}
    for kind, place in KINDS.items():
        if f"{kind}.safetensors" in content["files"]:
            file = path / f"{kind}.safetensors"
            found = load_file(file) if cut is None else read_rows(file, cut)
        elif any(name.startswith(f"{kind}/") for name in content["files"]):
            found = read_parts(path / kind, cut, ranks)
        else:
            continue
        put_tensors(state, {place + name: value for name, value in found.items()})
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
                remove_atomically(path)
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


def _by_kind(trainer_state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a state, by the kind of file they belong to and the path from there on."""
    tensors = tensors_in(trainer_state)
    kinds = {
        kind: {path.removeprefix(place): tensors.pop(path) for path in list(tensors) if path.startswith(place)}
        for kind, place in KINDS.items()
    }
    assert not tensors, f"a trainer's state holds tensors that have no file: {sorted(tensors)[:3]}"
    return {kind: part for kind, part in kinds.items() if part}


def _write_whole(partial: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> Records:
    """One file of each kind."""
    records: Records = {}
    for kind, values in tensors.items():
        name = f"{kind}.safetensors"
        content = {name: tensors_checksum(values)} if kind == SHARED else {}
        shared = _link_older(partial, content)
        if not shared:
            save_file(dict(values), partial / name)
        records |= shared or {name: _record_of(partial / name, content.get(name))}
    return records


def _write_parts(
    partial: Path, tensors: Mapping[str, Mapping[str, Tensor]], cut: ShardSpec, ranks: RankGroup
) -> Records:
    """One folder of each kind, with a file of every rank; all ranks return the records of all files."""
    records: Records = {}
    for kind, values in tensors.items():
        own = tensors_checksum(values) if kind == SHARED else None
        told = ranks.gather(own)
        content = {f"{kind}/{part_name(rank)}": each for rank, each in enumerate(told) if each is not None}
        shared = ranks.gather(_link_older(partial, content) if ranks.first else None)[0]
        if not shared:
            write_parts(partial / kind, values, cut, ranks)
        name = f"{kind}/{part_name(ranks.index)}"
        with together(ranks):
            wrote = not shared and (partial / name).is_file()
            record = {name: _record_of(partial / name, own)} if wrote else {}
        for each in ranks.gather(record):
            records |= each
        records |= shared
    return records


def _link_older(partial: Path, content: Mapping[str, str]) -> Records:
    """Takes over files of this content from the newest checkpoint that has all of them; returns their records."""
    for checkpoint in reversed(checkpoints_in(partial.parent)) if content else ():
        try:
            files = _read_state(checkpoint)["files"]
            records: Records = {name: files.get(name, {}) for name in content}
            if not all(_still_has(checkpoint / name, records[name], content[name]) for name in content):
                continue
            for name in content:
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).hardlink_to(checkpoint / name)
            return records
        except (
            OSError,
            CheckpointError,
        ):  # no hard links here, or that one is damaged: they are written once more
            for name in content:
                (partial / name).unlink(missing_ok=True)
    return {}


def _still_has(file: Path, record: Mapping[str, Any], content: str) -> bool:
    return record.get("content") == content and file.stat().st_size == record["bytes"]


def _write_state(
    partial: Path, step: int, trainer_state: Mapping[str, Any], facts: Mapping[str, Any], known: Records
) -> None:
    """`state.json`, which makes a folder a checkpoint: after everything that it tells the checksums of."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    names = [path.relative_to(partial).as_posix() for path in files]
    content = {
        "format": WHOLE if trainer_state.get("shard") is None else PARTS,
        "step": step,
        "trainer": {key: value for key, value in without_tensors(trainer_state).items() if key != "shard"},
        "facts": dict(facts),
        "files": {name: known.get(name) or _record_of(path) for name, path in zip(names, files, strict=True)},
    }
    text = json.dumps(content | {"checksum": fingerprint_of(content)}, indent=1)
    (partial / STATE).write_text(text, encoding="utf-8")


def _record_of(path: Path, content: str | None = None) -> dict[str, Any]:
    record = {"bytes": path.stat().st_size, "checksum": file_checksum(path)}
    return record if content is None else record | {"content": content}


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
    if content["format"] not in (WHOLE, PARTS):
        raise CheckpointError(
            f"{path}: is of format {content['format']!r}, known: {WHOLE}, {PARTS}; "
            "resume with the version of DigenRL that wrote it"
        )
    checksum = content.pop("checksum", None)
    if checksum != fingerprint_of(content):
        raise _damaged(path, f"{STATE} does not match its checksum")
    return content


def _check_fingerprint(path: Path, found: str | None, wanted: str | None) -> None:
    if wanted is not None and found != wanted:
        raise CheckpointError(
            f"{path}: was made with another recipe (fingerprint {found}, this one has {wanted}); resume with "
            "the recipe it was made with, or start a new run"
        )


def _check_file(path: Path, name: str, record: Mapping[str, Any]) -> None:
    file = path / name
    if not file.is_file():
        raise _damaged(path, f"{name} is missing")
    try:
        size = file.stat().st_size
        checksum = file_checksum(file) if size == record["bytes"] else None
    except OSError as error:
        raise _damaged(path, f"{name} cannot be read: {reason_of(error)}") from None
    if size != record["bytes"]:
        raise _damaged(path, f"{name} has {size} bytes, expected {record['bytes']}")
    if checksum != record["checksum"]:
        raise _damaged(path, f"{name} does not match its checksum")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: is damaged: {what}; {_last_good(path.parent, path)}")


def _last_good(folder: Path, but: Path | None = None) -> str:
    others = [path for path in checkpoints_in(folder) if path != but]
    return f"the last good checkpoint is {others[-1]}" if others else "there is no other checkpoint"
