"""Before an optimizer step, all ranks compare what they are about to do; all take the step or none does."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from digenrl.training.metrics import Tally
from digenrl.training.ranks.rank_group import RankGroup, RanksError

NORM_TOLERANCE = 1e-9  # GPUs of different types may sum the same numbers in a different order


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """What one rank knows about an update before its step.

    `groups` are (place, index, rewards); `norm` is that of the gradient the rank holds.
    """

    batch: int
    update: int
    updates_done: int
    groups: Sequence[tuple[int, int, Sequence[float]]]
    norm: float
    pack_size: int | None
    tally: Tally

    def as_json(self) -> dict[str, Any]:
        """For other ranks; of the groups only a digest."""
        return {
            "batch": self.batch,
            "update": self.update,
            "updates_done": self.updates_done,
            "groups": blake2b(json.dumps(self.groups).encode(), digest_size=16).hexdigest(),
            "norm": self.norm,
            "pack_size": self.pack_size,
            "tally": self.tally.as_json(),
        }


@dataclass(frozen=True, slots=True)
class Consensus:
    """Equal on all ranks: the norm of the whole gradient, the metrics of all packs, the smallest pack size."""

    norm: float
    tally: Tally
    pack_size: int | None


def reach_consensus(facts: UpdateFacts, ranks: RankGroup | None, *, sharded: bool) -> Consensus:
    """Raises RanksError on all ranks unless they are at the same update with the same groups and gradient.

    Of a sharded gradient each rank holds a part; otherwise all of them hold the whole.
    """
    if ranks is None:
        return Consensus(facts.norm, facts.tally, facts.pack_size)
    reports = ranks.gather(facts.as_json())
    for field in ("batch", "update", "updates_done", "groups"):
        check_same(f"{field} of an update", [report[field] for report in reports])
    norms = [report["norm"] for report in reports]
    if not sharded:
        check_same("gradient norm of an update", norms)
    tally = Tally()
    for report in reports:
        tally.add_json(report["tally"])
    sizes = [report["pack_size"] for report in reports if report["pack_size"] is not None]
    return Consensus(math.hypot(*norms) if sharded else norms[0], tally, min(sizes, default=None))


def check_same(what: str, values: Sequence[Any]) -> None:
    """Raises RanksError unless the values of all ranks are equal, floating-point ones up to rounding."""
    if not all(_same(value, values[0]) for value in values):
        listed = ", ".join(f"rank {index}: {value}" for index, value in enumerate(values))
        raise RanksError(f"ranks disagree about the {what} ({listed}); the weights are unchanged")


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=NORM_TOLERANCE) or (math.isnan(left) and math.isnan(right))
    return bool(left == right)
