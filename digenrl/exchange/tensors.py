"""Tensors by name: written once, mapped by the workers that read them, and never modified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from digenrl.checksums import quick_file_checksum
from digenrl.exchange.folder import ExchangeFolder, check_weights
from digenrl.exchange.tensor_bytes import mapped_tensors, tensor_bytes
from digenrl.records import WeightsReference


class Exchange(Protocol):
    """A worker's access to the tensors of other workers. Callers must not modify tensors that they got."""

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Stores tensors under a name; returns their size in bytes."""

    def get(self, name: str) -> dict[str, Tensor]:
        """The tensors of a name."""

    def drop(self, name: str) -> None:
        """Removes a name."""

    def put_weights(self, name: str, tensors: Mapping[str, Tensor]) -> WeightsReference:
        """Like `put`, with a checksum that readers verify."""

    def get_weights(self, reference: WeightsReference) -> dict[str, Tensor]:
        """The weights of a reference. Raises ValueError if their size or checksum differs from it."""


class TensorExchange:
    """Stores tensors as files of a run's exchange folder, and memory-maps them. A name is complete or absent."""

    def __init__(self, folder: ExchangeFolder) -> None:
        self._folder = folder

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        path = self._folder.path(name)
        partial = path.with_suffix(".part")
        try:
            with partial.open("wb") as file:
                file.writelines(tensor_bytes(tensors))
                size = file.tell()
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)  # incomplete if there was not enough space
        return size

    def get(self, name: str) -> dict[str, Tensor]:
        return mapped_tensors(self._folder.path(name))

    def drop(self, name: str) -> None:
        self._folder.drop(name)

    def put_weights(self, name: str, tensors: Mapping[str, Tensor]) -> WeightsReference:
        size = self.put(name, tensors)
        return WeightsReference(name, size, quick_file_checksum(self._folder.path(name)))

    def get_weights(self, reference: WeightsReference) -> dict[str, Tensor]:
        path = self._folder.path(reference.name)
        check_weights(reference, path.stat().st_size, quick_file_checksum(path))
        return mapped_tensors(path)
