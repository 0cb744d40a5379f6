"""Which lanes get a row of a picture, and which are folded into one row because they look alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from digenrl.telemetry.trace import LaneInfo
from digenrl.telemetry.utilisation import LaneUse

# Folding one or two lanes hides them and saves next to nothing.
_FEWEST_FOLDED = 3


@dataclass(frozen=True, slots=True)
class LaneRow:
    """A row that shows one lane."""

    lane: LaneInfo


@dataclass(frozen=True, slots=True)
class FoldedRow:
    """A row that stands for several lanes like the ones above it."""

    lanes: tuple[LaneInfo, ...]

    def busy_share(self, uses: dict[str, LaneUse]) -> float:
        """The share of the folded lanes' lane-seconds spent working."""
        return sum(uses[lane.name].busy_share for lane in self.lanes) / len(self.lanes)


Row: TypeAlias = LaneRow | FoldedRow


def pools_of(lanes: Iterable[LaneInfo]) -> dict[str, tuple[LaneInfo, ...]]:
    """The lanes of every pool, pools and lanes in the order given."""
    pools: dict[str, tuple[LaneInfo, ...]] = {}
    for lane in lanes:
        pools[lane.pool] = (*pools.get(lane.pool, ()), lane)
    return pools


def fold_lanes(lanes: tuple[LaneInfo, ...], most_rows: int, kept: int) -> tuple[Row, ...]:
    """One row per lane, pool by pool; beyond `most_rows` lanes, the first `kept` of each kind and a fold.

    Lanes are of one kind when they share the pool and the name up to its number: "a100-0" and "a100-12".
    Every lane is in exactly one row.
    """
    if len(lanes) <= most_rows:
        kept = len(lanes)
    rows: list[Row] = []
    for of_pool in pools_of(lanes).values():
        for alike in _kinds(of_pool):
            shown = kept if len(alike) - kept >= _FEWEST_FOLDED else len(alike)
            rows.extend(LaneRow(lane) for lane in alike[:shown])
            if shown < len(alike):
                rows.append(FoldedRow(alike[shown:]))
    return tuple(rows)


def _kinds(lanes: tuple[LaneInfo, ...]) -> Iterable[tuple[LaneInfo, ...]]:
    kinds: dict[str, list[LaneInfo]] = {}
    for lane in lanes:
        stem = lane.name.rstrip("0123456789").rstrip("-_./# ")
        kinds.setdefault(stem, []).append(lane)
    return [tuple(alike) for alike in kinds.values()]
