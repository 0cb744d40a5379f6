"""Before a step all ranks tell each other what they are about to do; it is taken by all of them or by none."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from digenrl.training.metrics import Tally
from digenrl.training.ranks.rank_group import RankGroup, RanksError

SAME_NORM = 1e-9  # cards of several kinds may add the same numbers up in another order


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """What one rank knows of an update before its step.

    `groups` are (place, index, rewards); `norm` is of the gradient that the rank holds.
    """

    batch: int
    update: int
    updates_done: int
    groups: Sequence[tuple[int, int, Sequence[float]]]
    norm: float
    pack_size: int | None
    tally: Tally


@dataclass(frozen=True, slots=True)
class Agreed:
    """The same on all ranks: the norm of the whole gradient, what all packs counted, the smallest pack size."""

    norm: float
    tally: Tally
    pack_size: int | None


def agree(facts: UpdateFacts, ranks: RankGroup | None, *, sharded: bool) -> Agreed:
    """Raises RanksError, on all ranks, unless all are at one update of the same groups with the same gradient.

    A sharded gradient has a part on every rank; any other is the same on all of them.
    """
    if ranks is None:
        return Agreed(facts.norm, facts.tally, facts.pack_size)
    told = ranks.gather(_for_json(facts))
    for what in ("batch", "update", "updates_done", "groups"):
        check_same(f"{what} of an update", [each[what] for each in told])
    norms = [each["norm"] for each in told]
    if not sharded:
        check_same("gradient norm of an update", norms)
    tally = Tally()
    for each in told:
        tally.add_facts(each["tally"])
    sizes = [each["pack_size"] for each in told if each["pack_size"] is not None]
    return Agreed(math.hypot(*norms) if sharded else norms[0], tally, min(sizes, default=None))


def _for_json(facts: UpdateFacts) -> Mapping[str, Any]:
    return {
        "batch": facts.batch,
        "update": facts.update,
        "updates_done": facts.updates_done,
        "groups": blake2b(json.dumps(facts.groups).encode(), digest_size=16).hexdigest(),
        "norm": facts.norm,
        "pack_size": facts.pack_size,
        "tally": facts.tally.facts(),
    }


def check_same(what: str, values: Sequence[Any]) -> None:
    """Raises RanksError unless all ranks said the same, numbers up to rounding."""
    if not all(_same(value, values[0]) for value in values):
        listed = ", ".join(f"rank {index}: {value}" for index, value in enumerate(values))
        raise RanksError(f"ranks disagree about the {what} ({listed}); the weights are unchanged")


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=SAME_NORM) or (math.isnan(left) and math.isnan(right))
    return bool(left == right)
