"""Sharded tensors in files: each rank writes its own, and any number of ranks, or other stages, can read them.

Uses torch's distributed checkpointing in its safetensors format: nothing is pickled, and the header of each file
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

from digenrl.config.reading import one_line
from digenrl.training.ranks.rank_group import RankGroup, RanksError
from digenrl.training.ranks.sharding import ShardSpec


def shard_file_name(rank: int) -> str:
    """The name that torch gives to a rank's file."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write_shards(folder: Path, shards: Mapping[str, Tensor], spec: ShardSpec, ranks: RankGroup) -> None:
    """Writes the shards of all ranks, from the CPU. A collective that succeeds on all ranks or raises on all."""
    mesh = ranks.mesh("cpu")
    state = {path: _as_sharded(path, value, spec, mesh) for path, value in shards.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with ranks.collective("writing a checkpoint"):
            save(state, storage_writer=writer)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RanksError(f"rank {rank}: {getattr(cause, 'strerror', None) or one_line(cause)}") from error


def read_shards(folder: Path, spec: ShardSpec | None = None, ranks: RankGroup | None = None) -> dict[str, Tensor]:
    """Reads whole tensors or, with a spec, one rank's shards, however many ranks wrote them. Not a collective."""
    reader = HuggingFaceStorageReader(str(folder))
    mesh = None if ranks is None or spec is None else ranks.mesh("cpu")
    state: dict[str, Tensor] = {}
    for path, found in reader.read_metadata().state_dict_metadata.items():
        if spec is not None and not spec.holds(path):
            continue
        assert isinstance(found, TensorStorageMetadata), f"{folder}: {path} is not a tensor"
        in_rows = spec is not None and not spec.whole
        whole = torch.empty(found.size, dtype=found.properties.dtype, device="meta" if in_rows else "cpu")
        state[path] = _empty_shard(path, whole, spec, mesh) if in_rows and spec and mesh else whole
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {path: value.to_local() if isinstance(value, DTensor) else value for path, value in state.items()}


def read_rows(file: Path, spec: ShardSpec) -> dict[str, Tensor]:
    """Reads one rank's shards of the whole tensors in a safetensors file."""
    shards: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as tensors:
        for path in filter(spec.holds, tensors.keys()):
            whole = tensors.get_slice(path)
            parameter = spec.parameter_of(path, len(whole.get_shape()))
            shards[path] = tensors.get_tensor(path) if parameter is None else whole[spec.rows(parameter)]
    return shards


def _empty_shard(path: str, whole: Tensor, spec: ShardSpec, mesh: DeviceMesh) -> Tensor:
    parameter = spec.parameter_of(path, whole.dim())
    if parameter is None:
        return torch.empty_like(whole, device="cpu")
    return _as_sharded(path, torch.empty_like(whole[spec.rows(parameter)], device="cpu"), spec, mesh)


def _as_sharded(path: str, shard: Tensor, spec: ShardSpec, mesh: DeviceMesh) -> Tensor:
    """A DTensor around this rank's shard; a tensor that is whole is returned as it is."""
    parameter = spec.parameter_of(path, shard.dim())
    if parameter is None or spec.whole:
        return shard
    shape = torch.Size(spec.shapes[parameter])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
