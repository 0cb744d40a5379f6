"""What workers left in the object store, by name. The driver holds references and never gets what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray


class RayArtifactStore:
    """References by name; the store frees what nobody refers to."""

    def __init__(self, holds_weights: bool = True) -> None:
        self.holds_weights = holds_weights
        self._references: dict[str, Any] = {}
        self._made_on: dict[str, str | None] = {}  # the node of who left it

    def keep(self, name: str, reference: Any, node_id: str | None) -> None:
        """From now on this is what the name means."""
        self._references[name], self._made_on[name] = reference, node_id

    def get(self, name: str) -> Any | None:
        """The reference, not the tensors; None if there is nothing of this name."""
        return self._references.get(name)

    def drop(self, name: str) -> None:
        """Forgets a name; who works with its tensors keeps them. Dropping what is not there does nothing."""
        self._references.pop(name, None)
        self._made_on.pop(name, None)

    def lost(self, names: Iterable[str], error: Exception) -> tuple[str, ...]:
        """Those of the names whose tensors are, after this error, to be taken for lost.

        Ray names one, and may leave a note in the place of another. So whatever was made on a machine that is no
        more counts as lost too, even where a copy might be left.
        """
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        named = getattr(getattr(error, "cause", error), "object_ref_hex", "")
        held = [name for name in names if name in self._references]
        return tuple(
            name for name in held if self._made_on[name] not in alive or self._references[name].hex() == named
        )

    def clear(self) -> None:
        """Forgets everything."""
        self._references.clear()
        self._made_on.clear()

    def free_bytes(self) -> int:
        """How much more the object stores of all machines can hold together."""
        return int(ray.available_resources().get("object_store_memory", 0))

    def where(self) -> str:
        """What it is called, for people."""
        return "the cluster's object store"
