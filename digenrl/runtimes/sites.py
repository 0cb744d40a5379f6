"""Where a run's workers are: what they are reached by, who they are, and how they go. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from digenrl.config.recipe import Recipe
from digenrl.runtimes.placement import Crew
from digenrl.runtimes.transport import Shelf, Transport


@dataclass(frozen=True, slots=True)
class Site:
    """What one run works with. `close` ends its workers and frees what they left; it may be called twice.

    `carried` are numbers about what went over a network since it was asked last, where there is one.
    """

    transport: Transport
    exchange: Shelf
    crew: Crew
    close: Callable[[], None]
    carried: Callable[[], dict[str, float]] = dict


class Grounds(Protocol):
    """What there is to work on, found good for a recipe before anything is written or loaded."""

    def settle(self, recipe: Recipe, run: Path, checkpoint: Path | None) -> Site:
        """Makes ready for a run, which may begin from a checkpoint; workers are started later."""

    def close(self) -> None:
        """Lets go of everything."""
