"""Tensors that travel with orders: each name's are one array of bytes, which an object store keeps."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor

from digenrl.records import WeightsReference

Parcel = NDArray[np.uint8]
LENGTH_BYTES = 8  # a parcel begins with the length of what is in it
# What is smaller than this some object stores do not keep: they hand it to whoever asked for it, here the driver.
SMALLEST_PARCEL = 128 << 10


class CarriedTensors:
    """A worker's exchange, for the time of one order: what came with it, and what goes back with its report."""

    def __init__(self) -> None:
        self._came: dict[str, Parcel] = {}
        self._leaving: dict[str, Parcel] = {}

    def open(self, parcels: Mapping[str, Parcel]) -> None:
        """An order begins, and these came with it."""
        self._came, self._leaving = dict(parcels), {}

    def close(self) -> dict[str, Parcel]:
        """The order ends: what it leaves."""
        leaving = self._leaving
        self._came, self._leaving = {}, {}
        return leaving

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Leaves tensors under a name; returns their size in bytes."""
        return self._put(name, tensors)[0]

    def get(self, name: str) -> dict[str, Tensor]:
        """The tensors of a name, in memory of their own."""
        tensors: dict[str, Tensor] = load(_content(self._came[name]))
        return tensors

    def drop(self, name: str) -> None:
        """Forgets what this order left."""
        self._leaving.pop(name, None)

    def put_weights(self, name: str, tensors: Mapping[str, Tensor]) -> WeightsReference:
        """Like `put`, with a checksum that every reader compares."""
        return WeightsReference(name, *self._put(name, tensors))

    def get_weights(self, reference: WeightsReference) -> dict[str, Tensor]:
        """The weights of a reference; raises ValueError if they are not, byte for byte, those that were put."""
        content = _content(self._came[reference.name])
        found = (len(content), zlib.crc32(content))
        if found != (reference.bytes, reference.checksum):
            raise ValueError(f"{reference.name}: arrived damaged, as {found}; expected {reference}")
        tensors: dict[str, Tensor] = load(content)
        return tensors

    def _put(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        content = save({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
        parcel = np.zeros(max(LENGTH_BYTES + len(content), SMALLEST_PARCEL), np.uint8)
        parcel[:LENGTH_BYTES] = np.frombuffer(len(content).to_bytes(LENGTH_BYTES, "little"), np.uint8)
        parcel[LENGTH_BYTES : LENGTH_BYTES + len(content)] = np.frombuffer(content, np.uint8)
        self._leaving[name] = parcel
        return len(content), zlib.crc32(content)


def _content(parcel: Parcel) -> bytes:
    length = int.from_bytes(parcel[:LENGTH_BYTES].tobytes(), "little")
    return parcel[LENGTH_BYTES : LENGTH_BYTES + length].tobytes()
