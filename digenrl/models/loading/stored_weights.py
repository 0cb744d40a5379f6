"""Weights that stay in their .safetensors files until single tensors, or some of their rows, are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from digenrl.models.loading.weight_files import read_header
from digenrl.models.parallel.shards import with_local_rows


class StoredWeights:
    """The tensors of some files, with their `shapes` by name. Use it in a `with` block, which closes the files."""

    def __init__(self, files: Iterable[Path]) -> None:
        headers = {file: read_header(file) for file in files}
        self._file_of = {name: file for file, header in headers.items() for name in header}
        self.shapes = {name: entry.shape for header in headers.values() for name, entry in header.items()}
        self._opened = ExitStack()
        self._handles: dict[Path, Any] = {}

    def __enter__(self) -> StoredWeights:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()
        self._handles = {}

    def read(self, name: str, rows: slice, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """These rows of a tensor, in memory of their own; nothing else is read."""
        file = self._file_of[name]
        if file not in self._handles:
            self._handles[file] = self._opened.enter_context(safe_open(file, framework="pt"))
        stored: Tensor = self._handles[file].get_slice(name)[rows]
        return stored.to(device=device, dtype=dtype, copy=True)


def read_weights(
    transformer: nn.Module,
    stored: StoredWeights,
    device: torch.device | str,
    rows: Callable[[str], slice] = lambda name: slice(None),
) -> None:
    """Reads the values of all weights of a transformer that has none; others in the files are left out.

    Of a sharded weight, this rank's `rows` are read.
    """
    values: dict[str, Tensor] = {}
    for name, value in transformer.state_dict().items():
        stored_name = name.replace(".base_layer.", ".")
        found = stored.shapes.get(stored_name)
        if found is None and not value.is_meta:
            continue  # an adapter, or a table that is computed
        if found != tuple(value.shape):
            given = "missing" if found is None else str(found)
            raise ValueError(f"the transformer's weight {name} is {given} in its files, not {tuple(value.shape)}")
        if isinstance(value, DTensor):
            values[name] = with_local_rows(value, stored.read(stored_name, rows(name), value.dtype, device))
        else:
            values[name] = stored.read(stored_name, slice(None), value.dtype, device)
    transformer.load_state_dict(values, assign=True, strict=False)
