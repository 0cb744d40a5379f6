"""Tensors that workers left in Ray's object store. The driver holds references to them, and never the tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray

from digenrl.records import patch_name


class RayArtifactStore:
    """References by name. Ray frees an object when its last reference is dropped."""

    def __init__(self, holds_weights: bool = True) -> None:
        self.holds_weights = holds_weights
        self._references: dict[str, tuple[Any, str | None]] = {}  # with the node that made the object

    def put(self, name: str, reference: Any, node_id: str | None) -> None:
        """Keeps a reference to an object that a worker on this node has left."""
        self._references[name] = (reference, node_id)

    def get(self, name: str) -> Any | None:
        """The reference, or None if the name is unknown."""
        return self._references.get(name, (None,))[0]

    def node_of(self, name: str) -> str | None:
        """The node that made the object, if that is known."""
        return self._references.get(name, (None, None))[1]

    def drop(self, name: str) -> None:
        """Drops a name, and the patch of weights with it."""
        self._references.pop(name, None)
        self._references.pop(patch_name(name), None)

    def lost(self, names: Iterable[str], error: Exception) -> tuple[str, ...]:
        """The names whose objects are considered lost after this error.

        Ray's error names one object at most. Objects that were made on a dead machine count as lost too, even if
        there may be a copy of them elsewhere.
        """
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        named = getattr(getattr(error, "cause", error), "object_ref_hex", "")
        found = [(name, *self._references[name]) for name in names if name in self._references]
        return tuple(
            name for name, reference, node_id in found if node_id not in alive or reference.hex() == named
        )

    def clear(self) -> None:
        """Drops all names."""
        self._references.clear()

    def free_bytes(self) -> int:
        """Free space of the object stores of all machines together."""
        return int(ray.available_resources().get("object_store_memory", 0))

    def where(self) -> str:
        return "the cluster's object store"
