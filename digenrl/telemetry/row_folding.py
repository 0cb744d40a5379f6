"""Which lanes get their own row in a chart, and which similar lanes share one folded row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from digenrl.telemetry.trace import LaneInfo
from digenrl.telemetry.utilization import LaneUse

# Folding one or two lanes hides them and saves almost no space.
_FEWEST_FOLDED = 3


@dataclass(frozen=True, slots=True)
class FoldedRow:
    """A row for several lanes that are similar to those above it."""

    lanes: tuple[LaneInfo, ...]

    def busy_share(self, uses: dict[str, LaneUse]) -> float:
        """The mean busy share of the folded lanes."""
        return sum(uses[lane.name].busy_share for lane in self.lanes) / len(self.lanes)


Row: TypeAlias = LaneInfo | FoldedRow


def pools_of(lanes: Iterable[LaneInfo]) -> dict[str, tuple[LaneInfo, ...]]:
    """The lanes of every pool, pools and lanes in the order given."""
    pools: dict[str, tuple[LaneInfo, ...]] = {}
    for lane in lanes:
        pools[lane.pool] = (*pools.get(lane.pool, ()), lane)
    return pools


def kind_of(name: str) -> str:
    """The name of a lane up to its number.

    >>> kind_of("a100-12")
    'a100'
    """
    return name.rstrip("0123456789").rstrip("-_./# ")


def fold_lanes(lanes: tuple[LaneInfo, ...], most_rows: int, kept: int) -> tuple[Row, ...]:
    """One row per lane, pool by pool; above `most_rows` lanes, the first `kept` of each kind and a folded row.

    Lanes are of one kind if they share the pool and the name up to its number: "a100-0" and "a100-12".
    Every lane is in exactly one row.
    """
    if len(lanes) <= most_rows:
        kept = len(lanes)
    rows: list[Row] = []
    for of_pool in pools_of(lanes).values():
        for alike in _kinds(of_pool):
            shown = kept if len(alike) - kept >= _FEWEST_FOLDED else len(alike)
            rows.extend(alike[:shown])
            if shown < len(alike):
                rows.append(FoldedRow(alike[shown:]))
    return tuple(rows)


def _kinds(lanes: tuple[LaneInfo, ...]) -> Iterable[tuple[LaneInfo, ...]]:
    kinds: dict[str, list[LaneInfo]] = {}
    for lane in lanes:
        kinds.setdefault(kind_of(lane.name), []).append(lane)
    return [tuple(alike) for alike in kinds.values()]
