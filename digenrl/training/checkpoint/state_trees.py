"""A state as tensors alone and back: what travels and is kept as bytes, or lies in files.

A state is a tree of dictionaries with text as keys; its leaves are tensors and what JSON can hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

REST = "json"  # the one name without a slash: all tensors of a state lie deeper


def state_as_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state's tensors by their paths, keys joined by slashes, and everything else as one tensor of bytes."""
    tensors = tensors_in(state)
    assert REST not in tensors, f"a tensor named {REST!r} at the top of a state"
    text = json.dumps(without_tensors(state)).encode()
    return tensors | {REST: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def state_of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state again, bit for bit; tuples have become lists, as in JSON."""
    state: dict[str, Any] = json.loads(tensors[REST].cpu().numpy().tobytes())
    put_tensors(state, {path: value for path, value in tensors.items() if path != REST})
    return state


def tensors_in(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of the tree under its path, keys joined by slashes."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        assert "/" not in key, f"a slash in the name {key!r} would break its path"
        if isinstance(value, Tensor):
            found[prefix + key] = value.contiguous()
        elif isinstance(value, Mapping):
            found |= tensors_in(value, f"{prefix}{key}/")
    return found


def without_tensors(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with its tensors left out; dictionaries that held nothing else stay, empty."""
    return {
        key: without_tensors(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if not isinstance(value, Tensor)
    }


def put_tensors(tree: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Puts tensors back under their paths, into a tree that they were left out of."""
    for path, value in tensors.items():
        *way, last = path.split("/")
        inside = tree
        for key in way:
            inside = inside[key]
        inside[last] = value
