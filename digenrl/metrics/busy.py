"""How busy every lane was in a step, counted while the run goes on, by the rules of `telemetry.utilisation`.

A card with several rows (the trainer's, a helper's; in colocated mode every generator's) is busy in each of them
whenever it works. Publishing keeps no lane busy. A lane's share is over the time it was there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from digenrl.scheduling import SchedulerState
from digenrl.telemetry.trace import GENERATOR_POOL, TRAINER_LANE, Span, Work

TRAINER_POOL = "trainer"
REWARD_POOL = "reward"
Stretches: TypeAlias = list[tuple[int, int]]  # (start_ns, end_ns)


@dataclass(slots=True)
class _Row:
    """One lane in the current window; `stretches` are those of its work that do not touch."""

    pool: str
    since_ns: int | None  # when it became present; None for a lane that is gone
    stays: Stretches = field(default_factory=list)  # when it was there before that, in this window
    stretches: Stretches = field(default_factory=list)

    def add(self, start_ns: int, end_ns: int) -> None:
        if self.stretches:
            last_start_ns, last_end_ns = self.stretches[-1]
            if start_ns <= last_end_ns and last_start_ns <= end_ns:
                self.stretches[-1] = (min(start_ns, last_start_ns), max(end_ns, last_end_ns))
                return
        self.stretches.append((start_ns, end_ns))


class BusyMeter:
    """Busy shares of one window of time after the other. It keeps the current window's stretches of work only."""

    def __init__(self, opening: SchedulerState, begin_ns: int = 0) -> None:
        self._shared_cards = opening.terms.colocated
        self._rows: dict[str, _Row] = {}
        for lane in opening.lanes:
            helps = lane.helper and not self._shared_cards
            if lane.present:
                self._rows[lane.name] = _Row(TRAINER_POOL if helps else GENERATOR_POOL, begin_ns)
        for index in range(opening.terms.scorers):
            self._rows[f"reward-{index}"] = _Row(REWARD_POOL, begin_ns)
        self._rows[TRAINER_LANE] = _Row(TRAINER_POOL, begin_ns)

    def add(self, span: Span) -> None:
        """A span that has closed."""
        if span.work is not Work.PUBLISH:
            self._add(span.lane, span.start_ns, span.end_ns)

    def joined(self, lane: str, at_ns: int) -> None:
        """A generator lane is there from now on."""
        self._rows.setdefault(lane, _Row(GENERATOR_POOL, None)).since_ns = at_ns

    def left(self, lane: str, at_ns: int) -> None:
        """A lane is gone; a lane that is gone already stays so."""
        if lane in self._rows:
            self._end_stay(lane, at_ns)

    def next_window(self, now_ns: int, under_way: Iterable[tuple[str, int]]) -> dict[str, float]:
        """The shares from the window's begin to now, by lane; the next window begins.

        `under_way` is work that has not closed yet: lanes, and since when.
        """
        for lane, since_ns in under_way:
            self._add(lane, since_ns, now_ns)
        here = {name: row for name, row in self._rows.items() if row.since_ns is not None}
        for name in here:
            self._end_stay(name, now_ns)
        shares = {name: self._busy_share(name) for name, row in self._rows.items() if _length(row.stays)}
        self._rows = {name: _Row(row.pool, now_ns) for name, row in here.items()}
        return shares

    @property
    def stretches_kept(self) -> int:
        """How much it remembers."""
        return sum(len(row.stretches) for row in self._rows.values())

    def _end_stay(self, lane: str, at_ns: int) -> None:
        row = self._rows[lane]
        if row.since_ns is not None:
            row.stays.append((row.since_ns, at_ns))
            row.since_ns = None

    def _add(self, lane: str, start_ns: int, end_ns: int) -> None:
        if start_ns < end_ns and lane in self._rows:
            self._rows[lane].add(start_ns, end_ns)

    def _busy_share(self, name: str) -> float:
        work, stays = self._work_of_card(name), self._rows[name].stays
        busy_ns = sum(_length(_within(work, start_ns, end_ns)) for start_ns, end_ns in stays)
        return busy_ns / _length(stays)

    def _work_of_card(self, name: str) -> Stretches:
        stretches = list(self._rows[name].stretches)
        if name == TRAINER_LANE:
            for other in self._rows:
                if self._is_card_of_trainer(other):
                    stretches += self._rows[other].stretches
        elif self._is_card_of_trainer(name):
            stretches += self._rows[TRAINER_LANE].stretches
        return stretches

    def _is_card_of_trainer(self, name: str) -> bool:
        pool = self._rows[name].pool
        return name != TRAINER_LANE and (pool == TRAINER_POOL or (self._shared_cards and pool == GENERATOR_POOL))


def _within(stretches: Stretches, first_ns: int, last_ns: int) -> Stretches:
    return [(max(start_ns, first_ns), min(end_ns, last_ns)) for start_ns, end_ns in stretches]


def _length(stretches: Stretches) -> int:
    """How long at least one of them lasts."""
    total_ns, covered_until_ns = 0, -1
    for start_ns, end_ns in sorted(stretches):
        start_ns = max(start_ns, covered_until_ns)
        if start_ns < end_ns:
            total_ns += end_ns - start_ns
            covered_until_ns = end_ns
    return total_ns
