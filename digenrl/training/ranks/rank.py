"""The position of one process among those that train together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank `index` of `count`. A trainer that works alone is rank 0 of 1."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"rank {self.index} of {self.count}"

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and reports for all."""
        return self.index == 0
