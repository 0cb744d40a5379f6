"""Named tensors as the bytes of a safetensors file.

The library's own writer spends about 0.1 ms on each tensor, which a trainer's state with hundreds of them feels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

ALIGNMENT = 8  # of the header's end, and so of the first tensor
LENGTH_BYTES = 8
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_bytes(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The pieces of a safetensors file: its header, then the values of each tensor, without copies on a CPU.

    Larger types come first, so that all values are aligned.
    """
    on_host = {name: _contiguous_on_host(value.detach()) for name, value in tensors.items()}
    names = sorted(on_host, key=lambda name: (-on_host[name].itemsize, name))
    header, offset = {}, 0
    for name in names:
        value = on_host[name]
        end = offset + value.nbytes
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield len(text).to_bytes(LENGTH_BYTES, "little") + text
    for name in names:
        if on_host[name].nbytes:
            yield _values(on_host[name])


def _contiguous_on_host(value: Tensor) -> Tensor:
    return value if value.is_cpu and value.is_contiguous() else value.cpu().contiguous()


def _values(value: Tensor) -> memoryview:
    if value.dtype is torch.bfloat16:  # unknown to numpy
        value = value.view(torch.int16)
    return value.numpy().data
