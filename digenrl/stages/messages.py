"""Messages between stages: some tensors, coded, as one vector of bytes in host memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from digenrl.stages.codec_choice import Codec
from digenrl.stages.codecs import decode, encode

# What one block hands to the next: some tensors, of which some may be missing.
States = tuple[Tensor | None, ...]

DTYPES = {str(each): each for each in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)}


@dataclass(frozen=True, slots=True)
class Packed:
    """A description of tensors as JSON, and their coded values."""

    description: bytes
    payload: Tensor


def pack(states: States, codec: Codec) -> Packed:
    """Codes the tensors. A receiver also learns which of them require a gradient."""
    coded = [None if value is None else encode(value, codec).to("cpu") for value in states]
    entries = [
        None if value is None or payload is None else _described(value, payload, codec)
        for value, payload in zip(states, coded, strict=True)
    ]
    present = [payload for payload in coded if payload is not None]
    return Packed(
        json.dumps(entries).encode(), torch.cat(present) if present else torch.empty(0, dtype=torch.uint8)
    )


def unpack(packed: Packed, device: torch.device) -> States:
    """The tensors, on a device. Raises ValueError if they are damaged."""
    states: list[Tensor | None] = []
    start = 0
    for entry in json.loads(packed.description):
        if entry is None:
            states.append(None)
            continue
        payload = packed.payload[start : start + entry["bytes"]].to(device)
        start += entry["bytes"]
        codec = Codec(entry["codec"], entry["ratio"])
        value = decode(payload, tuple(entry["shape"]), DTYPES[entry["dtype"]], codec)
        states.append(value.requires_grad_(entry["requires_grad"]))
    return tuple(states)


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in rank order; a value is anything that JSON can represent. A collective."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)]))
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, torch.cat([own, torch.zeros(longest - len(own), dtype=torch.uint8)]))
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]


def _described(value: Tensor, payload: Tensor, codec: Codec) -> dict[str, Any]:
    if str(value.dtype) not in DTYPES:
        raise ValueError(f"stages cannot send {value.dtype}; known: {', '.join(DTYPES)}")
    return {
        "shape": list(value.shape),
        "dtype": str(value.dtype),
        "codec": codec.name,
        "ratio": codec.ratio,
        "requires_grad": value.requires_grad,
        "bytes": payload.numel(),
    }
