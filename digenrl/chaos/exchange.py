"""The exchange of a simulated world: names with what they stand for, and the machine that holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a worker left, and on which machine."""

    content: Any
    node: int


class VirtualExchange:
    """Implements ArtifactStore. Artifacts vanish with their machine; the trainer's state has a copy elsewhere."""

    holds_weights = True

    def __init__(self) -> None:
        self._artifacts: dict[str, Artifact] = {}
        self.lost: set[str] = set()  # names that went away with a machine

    def drop(self, name: str) -> None:
        self._artifacts.pop(name, None)

    def free_bytes(self) -> int:
        return 1 << 40

    def where(self) -> str:
        return "the virtual exchange"

    def put(self, name: str, content: Any, node: int) -> None:
        self._artifacts[name] = Artifact(content, node)
        self.lost.discard(name)

    def get(self, name: str) -> Any:
        return self._artifacts[name].content

    def missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self._artifacts]

    def names(self) -> list[str]:
        """All names, in the order in which they were left."""
        return list(self._artifacts)

    def lose(self, names: Iterable[str]) -> None:
        """These artifacts are lost with the machine that held them."""
        for name in names:
            if not name.startswith("state-") and self._artifacts.pop(name, None) is not None:
                self.lost.add(name)

    def lose_node(self, node: int) -> None:
        self.lose([name for name, artifact in self._artifacts.items() if artifact.node == node])
