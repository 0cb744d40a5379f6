"""Weights as one run of bytes with a header that says what lies where: what a broadcast carries."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.records import WeightsReference

BUCKET_BYTES = 25 << 20

# Read by name from headers, hence a closed list.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header: everything of it but its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How many bytes its values take."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """What is sent under a name, in how large buckets."""

    name: str
    bucket_bytes: int
    tensors: tuple[TensorEntry, ...]

    def encoded(self) -> bytes:
        """As it travels: JSON."""
        tensors = [[entry.name, entry.dtype, entry.shape] for entry in self.tensors]
        return json.dumps({"name": self.name, "bucket_bytes": self.bucket_bytes, "tensors": tensors}).encode()

    @property
    def total_bytes(self) -> int:
        """The size of all values."""
        return sum(entry.bytes for entry in self.tensors)


def header_of(name: str, tensors: Mapping[str, Tensor]) -> Header:
    """The header of these tensors; raises ValueError if one is of a kind that cannot travel."""
    entries = []
    for key, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES or value.layout is not torch.strided:
            known = ", ".join(DTYPES)
            raise ValueError(f"{name}: cannot send {key!r}, {dtype} and {value.layout}; known: dense {known}")
        entries.append(TensorEntry(key, dtype, tuple(value.shape)))
    return Header(name, BUCKET_BYTES, tuple(entries))


def read_header(encoded: bytes, reference: WeightsReference) -> Header:
    """The header of what was promised; raises ValueError if it is no header, or one of something else."""
    try:
        fields = json.loads(encoded)
        entries = tuple(TensorEntry(name, dtype, tuple(shape)) for name, dtype, shape in fields["tensors"])
        header = Header(fields["name"], int(fields["bucket_bytes"]), entries)
        found = (header.name, header.total_bytes)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{reference.name}: arrived damaged, its header cannot be read ({error!r})") from error
    if found != (reference.name, reference.bytes) or header.bucket_bytes <= 0:
        raise ValueError(f"{found[0]} of {found[1]:,} bytes arrived; expected {reference}")
    return header


def views(flat: Tensor, header: Header) -> dict[str, Tensor]:
    """The tensors of a header, in its order, as parts of the flat bytes.

    Wide dtypes lie first: every tensor is aligned without a gap.
    """
    offsets: dict[str, int] = {}
    offset = 0
    for entry in sorted(header.tensors, key=lambda entry: -DTYPES[entry.dtype].itemsize):
        offsets[entry.name] = offset
        offset += entry.bytes
    return {
        entry.name: flat[offsets[entry.name] : offsets[entry.name] + entry.bytes]
        .view(DTYPES[entry.dtype])
        .view(entry.shape)
        for entry in header.tensors
    }


@dataclass(frozen=True, slots=True)
class FlatWeights:
    """A copy of one version's weights on the CPU. Nobody changes it."""

    reference: WeightsReference
    header: bytes
    bucket_bytes: int
    flat: Tensor

    def buckets(self) -> Iterator[Tensor]:
        """Its bytes, in the order in which they are sent."""
        for offset in range(0, len(self.flat), self.bucket_bytes):
            yield self.flat[offset : offset + self.bucket_bytes]


def flatten(header: Header, tensors: Mapping[str, Tensor]) -> FlatWeights:
    """Copies the tensors of a header, whatever their device and strides; later changes of them are not seen."""
    flat = torch.empty(header.total_bytes, dtype=torch.uint8)
    for key, room in views(flat, header).items():
        room.copy_(tensors[key].detach())
    encoded = header.encoded()
    reference = WeightsReference(header.name, header.total_bytes, checksum(flat, zlib.crc32(encoded)))
    return FlatWeights(reference, encoded, header.bucket_bytes, flat)


def checksum(flat: Tensor, before: int) -> int:
    """CRC-32 of bytes that follow others of a known one. Other threads run meanwhile."""
    return zlib.crc32(flat.numpy().data, before)
