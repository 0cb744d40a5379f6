"""Tensors by name, written once and mapped by whoever reads them. What was put is not changed any more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl.checksums import quick_file_checksum
from digenrl.exchange.folder import ExchangeFolder
from digenrl.records import WeightsReference


class Exchange(Protocol):
    """A worker's side of an exchange. What was put is not changed any more, and what was got is not to be."""

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Leaves tensors under a name; returns their size in bytes."""

    def get(self, name: str) -> dict[str, Tensor]:
        """The tensors of a name."""

    def drop(self, name: str) -> None:
        """Forgets a name."""

    def put_weights(self, name: str, tensors: Mapping[str, Tensor]) -> WeightsReference:
        """Like `put`, with a checksum that every reader compares."""

    def get_weights(self, reference: WeightsReference) -> dict[str, Tensor]:
        """The weights of a reference; raises ValueError if they are not, byte for byte, those that were put."""


class TensorExchange:
    """Puts tensors into a run's folder and maps them again. A name is whole or absent."""

    def __init__(self, folder: ExchangeFolder) -> None:
        self._folder = folder

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Leaves tensors under a name; returns their size in bytes."""
        path = self._folder.path(name)
        partial = path.with_suffix(".part")
        try:
            save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, partial)
            size = partial.stat().st_size
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)  # half a file, where there was no room for the whole
        return size

    def get(self, name: str) -> dict[str, Tensor]:
        """The tensors of a name, mapped from memory: a change would be seen by nobody else, and is not meant."""
        return _mapped(self._folder.path(name))

    def drop(self, name: str) -> None:
        """Forgets a name."""
        self._folder.drop(name)

    def put_weights(self, name: str, tensors: Mapping[str, Tensor]) -> WeightsReference:
        """Like `put`, with a checksum that every reader compares."""
        size = self.put(name, tensors)
        return WeightsReference(name, size, quick_file_checksum(self._folder.path(name)))

    def get_weights(self, reference: WeightsReference) -> dict[str, Tensor]:
        """The weights of a reference; raises ValueError if they are not, byte for byte, those that were put."""
        path = self._folder.path(reference.name)
        found = (path.stat().st_size, quick_file_checksum(path))
        if found != (reference.bytes, reference.checksum):
            raise ValueError(f"{reference.name}: arrived damaged, as {found}; expected {reference}")
        return _mapped(path)


def _mapped(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(path)
    return tensors
