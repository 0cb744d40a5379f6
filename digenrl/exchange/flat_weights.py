"""The format of a weight broadcast: one flat array of bytes, and a header that describes the tensors in it."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.exchange.patches import VersionBytes, item_bytes_of
from digenrl.records import WeightsReference

BUCKET_BYTES = 4 << 20  # within the stall timeout of a broadcast, a link of 2.3 Mbit/s carries one

# Headers name dtypes as strings, so only these are accepted.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class WeightsHeader:
    """Describes the tensors of one weight version, and the size of the buckets in which they are sent."""

    name: str
    bucket_bytes: int
    tensors: tuple[TensorEntry, ...]

    def encode(self) -> bytes:
        tensors = [[entry.name, entry.dtype, entry.shape] for entry in self.tensors]
        return json.dumps({"name": self.name, "bucket_bytes": self.bucket_bytes, "tensors": tensors}).encode()

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.tensors)


def make_header(name: str, tensors: Mapping[str, Tensor]) -> WeightsHeader:
    """The header for these tensors. Raises ValueError for a sparse tensor or an unsupported dtype."""
    entries = []
    for key, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES or value.layout is not torch.strided:
            supported = ", ".join(DTYPES)
            raise ValueError(f"{name}: cannot send {key!r}, {dtype} {value.layout}; supported: dense {supported}")
        entries.append(TensorEntry(key, dtype, tuple(value.shape)))
    return WeightsHeader(name, BUCKET_BYTES, tuple(entries))


def decode_header(encoded: bytes, reference: WeightsReference) -> WeightsHeader:
    """Parses a header. Raises ValueError if it is malformed or does not match the reference."""
    try:
        fields = json.loads(encoded)
        entries = tuple(TensorEntry(name, dtype, tuple(shape)) for name, dtype, shape in fields["tensors"])
        header = WeightsHeader(fields["name"], int(fields["bucket_bytes"]), entries)
        found = (header.name, header.total_bytes)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{reference.name}: arrived damaged, its header cannot be read ({error!r})") from error
    if found != (reference.name, reference.bytes) or header.bucket_bytes <= 0:
        raise ValueError(f"received {found[0]} of {found[1]:,} bytes; expected {reference}")
    return header


def tensor_views(flat: Tensor, header: WeightsHeader) -> dict[str, Tensor]:
    """The tensors of a header as views of the flat bytes, in the header's order.

    Wider dtypes are stored first, so that every tensor is aligned without padding.
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
    """A copy of one weight version on the CPU. Not modified after it was made."""

    reference: WeightsReference
    header: bytes
    bucket_bytes: int
    flat: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The tensors as views of the flat bytes."""
        return tensor_views(self.flat, decode_header(self.header, self.reference))

    def version_bytes(self) -> VersionBytes:
        """The flat bytes as the base or the result of a patch. They are not copied."""
        item_bytes = item_bytes_of(self.tensors().values())
        return VersionBytes(self.reference.name, self.flat.numpy(), self.reference.checksum, item_bytes)


def flatten(header: WeightsHeader, tensors: Mapping[str, Tensor]) -> FlatWeights:
    """Copies the tensors of a header from any device and with any strides."""
    flat = torch.empty(header.total_bytes, dtype=torch.uint8)
    for key, view in tensor_views(flat, header).items():
        view.copy_(tensors[key].detach())
    encoded = header.encode()
    reference = WeightsReference(header.name, header.total_bytes, crc32(flat, zlib.crc32(encoded)))
    return FlatWeights(reference, encoded, header.bucket_bytes, flat)


def crc32(flat: Tensor, previous: int) -> int:
    """CRC-32 of these bytes, continued from the CRC-32 of those before them. Releases the GIL."""
    return zlib.crc32(flat.numpy().data, previous)
