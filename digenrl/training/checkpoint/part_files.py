"""Tensors that ranks hold parts of, in files: every rank writes its own, any number of ranks reads them.

By torch's distributed checkpointing, in its safetensors format: nothing is pickled, and the header of each file
says which rows of the whole tensors it holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from digenrl.training.ranks.rank_group import RankGroup, RanksError, in_one_line
from digenrl.training.ranks.sharding import ShardSpec


def part_name(rank: int) -> str:
    """The file that a rank writes into a folder of parts; the format's name for it."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write_parts(folder: Path, parts: Mapping[str, Tensor], cut: ShardSpec, ranks: RankGroup) -> None:
    """Every rank's parts, on the CPU, into files of this folder. All ranks call it; it works for all or none."""
    mesh = ranks.mesh("cpu")
    state = {path: _as_part_of_whole(path, value, cut, mesh) for path, value in parts.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with ranks.collective("writing a checkpoint"):
            save(state, storage_writer=writer)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RanksError(f"rank {rank}: {getattr(cause, 'strerror', None) or in_one_line(cause)}") from error


def read_parts(folder: Path, cut: ShardSpec | None = None, ranks: RankGroup | None = None) -> dict[str, Tensor]:
    """Whole tensors or, with a `cut`, this rank's parts of them, whoever wrote them. Nobody waits for anybody."""
    reader = HuggingFaceStorageReader(str(folder))
    mesh = None if ranks is None or cut is None else ranks.mesh("cpu")
    state: dict[str, Tensor] = {}
    for path, found in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(found, TensorStorageMetadata), f"{folder}: {path} is no tensor"
        whole = torch.empty(found.size, dtype=found.properties.dtype, device="cpu" if cut is None else "meta")
        state[path] = whole if cut is None or mesh is None else _empty_part(path, whole, cut, mesh)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be, alone
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {path: value.to_local() if isinstance(value, DTensor) else value for path, value in state.items()}


def read_rows(file: Path, cut: ShardSpec) -> dict[str, Tensor]:
    """This rank's parts of the whole tensors in a safetensors file."""
    parts: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as tensors:
        for path in tensors.keys():  # noqa: SIM118  it is no dictionary
            whole = tensors.get_slice(path)
            parameter = cut.parameter_at(path, len(whole.get_shape()))
            parts[path] = tensors.get_tensor(path) if parameter is None else whole[cut.rows(parameter)]
    return parts


def _empty_part(path: str, whole: Tensor, cut: ShardSpec, mesh: DeviceMesh) -> Tensor:
    parameter = cut.parameter_at(path, whole.dim())
    if parameter is None:
        return torch.empty_like(whole, device="cpu")
    return _as_part_of_whole(path, torch.empty_like(whole[cut.rows(parameter)], device="cpu"), cut, mesh)


def _as_part_of_whole(path: str, part: Tensor, cut: ShardSpec, mesh: DeviceMesh) -> Tensor:
    """A tensor that knows of which whole it is a part; one that every rank holds all of stays as it is."""
    parameter = cut.parameter_at(path, part.dim())
    if parameter is None:
        return part
    shape = torch.Size(cut.shapes[parameter])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
