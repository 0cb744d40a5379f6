"""Named tensors as the bytes of a safetensors file, and back.

The library's own functions spend 0.05 to 0.1 ms on each tensor, which adapters with hundreds of them feel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
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
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


def tensor_bytes(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The pieces of a safetensors file: its header, then the values of each tensor, without copies on a CPU.

    Larger types come first, so that all values are aligned.
    """
    values = {name: _on_host(value) for name, value in tensors.items()}
    names = sorted(values, key=lambda name: (-values[name].itemsize, name))
    header, offset = {}, 0
    for name in names:
        dtype, value = DTYPES[tensors[name].dtype], values[name]
        end = offset + value.nbytes
        header[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield len(text).to_bytes(LENGTH_BYTES, "little") + text
    for name in names:
        if values[name].nbytes:
            yield values[name].data


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that consists of `tensor_bytes`, mapped into memory."""
    content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    start = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES].numpy().data, "little")
    header = json.loads(content[LENGTH_BYTES:start].numpy().tobytes())
    sizes = [end - begin for begin, end in (entry["data_offsets"] for entry in header.values())]
    parts = torch.split_with_sizes(content[start:], sizes)
    return {
        name: part.view(DTYPE_OF[entry["dtype"]]).view(entry["shape"])
        for (name, entry), part in zip(header.items(), parts, strict=True)
    }


def _on_host(value: Tensor) -> np.ndarray:
    """The contiguous values in host memory, without a copy if they are there."""
    value = value.detach()
    if not (value.is_cpu and value.is_contiguous()):
        value = value.cpu().contiguous()
    if value.dtype is torch.bfloat16:  # unknown to NumPy
        value = value.view(torch.int16)
    return value.numpy()
