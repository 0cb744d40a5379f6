"""Tensors that workers left in Ray's object store. The driver holds references to them, and never the tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from digenrl.records import patch_name
from digenrl.transports.ray.sites import Sites


def _copy(content: Any) -> Any:
    """What a task returns is in the object store of its node."""
    return content


REMOTE_COPY: Any = ray.remote(num_cpus=0, max_retries=-1)(_copy)


class RayArtifactStore:
    """References by name. Ray frees an object when its last reference is dropped."""

    def __init__(self, sites: Sites, holds_weights: bool = True) -> None:
        self.holds_weights = holds_weights
        self._sites = sites
        self._references: dict[str, tuple[Any, str | None]] = {}  # with the node that made the object
        self._copies: dict[str, dict[str, Any]] = {}  # references by name, then by site

    def put(self, name: str, reference: Any, node_id: str | None) -> None:
        """Keeps a reference to an object that a worker on this node has left."""
        self._references[name] = (reference, node_id)
        self._copies.pop(name, None)

    def get(self, name: str) -> Any | None:
        """The reference, or None if the name is unknown."""
        return self._references.get(name, (None,))[0]

    def get_in_site(self, name: str, node_id: str | None) -> Any | None:
        """The reference for a worker on this node. In another site than the object's, it is that of a copy.

        The copy is made once, on the node that first asks for it, and other nodes of the site fetch it from there.
        If this node dies, Ray makes the copy again.
        """
        reference, source_id = self._references.get(name, (None, None))
        site = self._sites.beyond_a_link(node_id, source_id)
        if reference is None or not site:
            return reference
        copies = self._copies.setdefault(name, {})
        if site not in copies:
            on_node = NodeAffinitySchedulingStrategy(node_id, soft=True)
            copies[site] = REMOTE_COPY.options(scheduling_strategy=on_node).remote(reference)
        return copies[site]

    def node_of(self, name: str) -> str | None:
        """The node that made the object, if that is known."""
        return self._references.get(name, (None, None))[1]

    def drop(self, name: str) -> None:
        """Drops a name, and the patch of weights with it."""
        for each in (name, patch_name(name)):
            self._references.pop(each, None)
            self._copies.pop(each, None)

    def lost(self, names: Iterable[str], error: Exception) -> tuple[str, ...]:
        """The names whose objects are considered lost after this error.

        Ray's error names one object at most. Objects that were made on a dead machine count as lost too, even if
        there may be a copy of them elsewhere.
        """
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        named = getattr(getattr(error, "cause", error), "object_ref_hex", "")
        found = [(name, *self._references[name]) for name in names if name in self._references]
        return tuple(
            name
            for name, reference, node_id in found
            if node_id not in alive
            or any(each.hex() == named for each in (reference, *self._copies.get(name, {}).values()))
        )

    def clear(self) -> None:
        self._references.clear()
        self._copies.clear()

    def free_bytes(self) -> int:
        """Free space of the object stores of all machines together."""
        return int(ray.available_resources().get("object_store_memory", 0))

    def where(self) -> str:
        return "the cluster's object store"
