"""Saves and reads checkpoints of a trainer: complete or absent, verified when read, nothing pickled.

`format` describes the files. Any number of ranks, or one process, can read the checkpoint of a sharded trainer.
The frozen reference of full fine-tuning never changes: a new checkpoint shares the files of an older one through
hard links, if the file system supports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl.checksums import file_checksum, tensors_checksum
from digenrl.training.checkpoint.atomic_folders import partial_folder, remove_atomically, tidy, written_atomically
from digenrl.training.checkpoint.format import (
    SHARDED,
    WHOLE,
    CheckpointContent,
    CheckpointError,
    FileRecords,
    check_file,
    checkpoints_in,
    last_good,
    read_content,
    reason_of,
    step_folder,
)
from digenrl.training.checkpoint.shard_files import read_rows, read_shards, shard_file_name, write_shards
from digenrl.training.checkpoint.state_tensors import (
    KINDS,
    REFERENCE,
    TensorsByKind,
    state_from,
    tensors_by_kind,
    without_tensors,
)
from digenrl.training.ranks.rank_group import RankGroup, RanksError, all_or_none
from digenrl.training.ranks.sharding import ShardSpec
from digenrl.training.trainer_state import TrainerState

VERSION_BEFORE = "version_before"  # a kind of tensors that is not part of the trainer's state


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was saved after `step` optimizer steps. `facts` are as JSON returns them: lists, no tuples."""

    step: int
    trainer_state: TrainerState
    facts: dict[str, Any]


def save_checkpoint(
    folder: Path,
    step: int,
    state: TrainerState,
    facts: Mapping[str, Any],
    ranks: RankGroup | None = None,
    version_before: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes folder/step_NNNNNN and returns it; a checkpoint of the same step is replaced.

    `facts` is any content that JSON can represent. If anything fails, nothing is left behind and older checkpoints
    are unchanged. All ranks must call it, with their own state and a folder that they share. The first rank
    writes, or each its shards; it succeeds on all ranks or raises on all. `version_before` are the published
    weights of the version before, for `read_version_before`.
    """
    target, partial = step_folder(folder, step), partial_folder(step_folder(folder, step))
    is_first = ranks is None or ranks.rank.is_first
    tensors, records = tensors_by_kind(state), FileRecords()
    assert state.shard is None or ranks is not None, "shards must be saved by all ranks together"
    try:
        with ExitStack() as opened:
            with all_or_none(ranks):
                if is_first:
                    folder.mkdir(parents=True, exist_ok=True)
                    tidy(folder)
                    opened.enter_context(written_atomically(target))
            if state.shard is not None and ranks is not None:
                records = _write_shards(partial, tensors, state.shard, ranks)
            with all_or_none(ranks):
                if is_first:
                    records = records or _write_whole(partial, tensors)
                    if version_before:
                        records |= _write_whole(partial, {VERSION_BEFORE: dict(version_before)})
                    number = WHOLE if state.shard is None else SHARDED
                    CheckpointContent(number, step, without_tensors(state), dict(facts), records).write(partial)
                    opened.close()
    except (OSError, SafetensorError, CheckpointError, RanksError) as error:
        raise CheckpointError(f"{target}: could not be saved: {reason_of(error)}; {last_good(folder)}") from error
    return target


def read_checkpoint(path: Path, shard: ShardSpec | None = None, ranks: RankGroup | None = None) -> Checkpoint:
    """Reads a checkpoint after verifying the size and checksum of every file.

    Without `ranks` it is read whole. With them, all ranks must call it; they share the verification, and it
    succeeds on all ranks or raises on all. With a `shard`, a rank reads only its own rows.
    """
    try:
        with all_or_none(ranks):
            content = read_content(path)
            for index, (name, record) in enumerate(sorted(content.files.items())):
                if ranks is None or index % ranks.rank.count == ranks.rank.index:
                    check_file(path, name, record)
    except RanksError as error:
        raise CheckpointError(f"{path}: cannot be read by all ranks: {error}") from error
    tensors: TensorsByKind = {}
    for kind in KINDS:
        file = path / f"{kind}.safetensors"
        if file.name in content.files:
            tensors[kind] = load_file(file) if shard is None else read_rows(file, shard)
        elif any(name.startswith(f"{kind}/") for name in content.files):
            tensors[kind] = read_shards(path / kind, shard, ranks)
    return Checkpoint(content.step, state_from(content.trainer, tensors, shard), content.facts)


def read_version_before(path: Path) -> dict[str, Tensor]:
    """The published weights of the version before that of a checkpoint; none if it has none."""
    file = path / f"{VERSION_BEFORE}.safetensors"
    return load_file(file) if file.is_file() else {}


def prune_checkpoints(folder: Path, keep: int, just_written: Path | None = None) -> None:
    """Removes all checkpoints except the `keep` of the highest steps and the one just written."""
    assert keep >= 1, f"at least one checkpoint must be kept, got {keep}"
    try:
        for path in checkpoints_in(folder)[:-keep]:
            if path != just_written:
                remove_atomically(path)
    except OSError as error:
        raise CheckpointError(f"{folder}: an old checkpoint cannot be removed: {reason_of(error)}") from error


def _write_whole(partial: Path, tensors: TensorsByKind) -> FileRecords:
    records = FileRecords()
    for kind, values in tensors.items():
        name = f"{kind}.safetensors"
        contents = {name: tensors_checksum(values)} if kind == REFERENCE else {}
        linked = _link_older(partial, contents)
        if not linked:
            save_file(values, partial / name)
        records |= linked or {name: _record_of(partial / name, contents.get(name))}
    return records


def _write_shards(partial: Path, tensors: TensorsByKind, shard: ShardSpec, ranks: RankGroup) -> FileRecords:
    """Writes a folder per kind, with a file per rank; returns the records of all files on all ranks."""
    records = FileRecords()
    for kind, values in tensors.items():
        own = tensors_checksum(values) if kind == REFERENCE else None
        names = [f"{kind}/{shard_file_name(rank)}" for rank in range(ranks.rank.count)]
        contents = {
            name: content for name, content in zip(names, ranks.gather(own), strict=True) if content is not None
        }
        linked = ranks.gather(_link_older(partial, contents) if ranks.rank.is_first else None)[0]
        if not linked:
            write_shards(partial / kind, values, shard, ranks)
        name = names[ranks.rank.index]
        with all_or_none(ranks):
            written = not linked and (partial / name).is_file()
            record = {name: _record_of(partial / name, own)} if written else {}
        for each in ranks.gather(record):
            records |= each
        records |= linked
    return records


def _link_older(partial: Path, contents: Mapping[str, str]) -> FileRecords:
    """Links files with these content checksums from the newest checkpoint that has all; returns their records."""
    for checkpoint in reversed(checkpoints_in(partial.parent)) if contents else ():
        try:
            files = read_content(checkpoint).files
            records: FileRecords = {name: files.get(name, {}) for name in contents}
            if not all(_has_content(checkpoint / name, records[name], contents[name]) for name in contents):
                continue
            for name in contents:
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).hardlink_to(checkpoint / name)
            return records
        except (OSError, CheckpointError):  # no hard links here, or that checkpoint is damaged: write them again
            for name in contents:
                (partial / name).unlink(missing_ok=True)
    return {}


def _has_content(file: Path, record: Mapping[str, Any], content: str) -> bool:
    return record.get("content") == content and file.stat().st_size == record["bytes"]


def _record_of(path: Path, content: str | None = None) -> dict[str, Any]:
    record = {"bytes": path.stat().st_size, "checksum": file_checksum(path)}
    return record if content is None else record | {"content": content}
