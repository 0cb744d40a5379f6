"""Changes the pieces that lanes generate at random, and keeps what makes a step no longer.

Equal lanes are interchangeable, so that lanes of one kind are kept in the order of their pieces, and a change can
give a run of them the same ones. Among steps of equal length, those in which lanes end earlier are better: what
ends earlier leaves room for the next change.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from digenrl.scheduling import SharedWorkRule
from digenrl.simulation.step_forecast import NEVER_NS, StepForecast

Pieces = list[tuple[int, ...]]  # by lane

ANOTHER_TOTAL = (-1, 0, 0, 1)
OTHER_WAY = 0.1  # the share of changes that also change what lanes leave to others


def improved(forecast: StepForecast, start: SharedWorkRule, changes: int) -> SharedWorkRule:
    """The best rule that is found with this many changes."""
    return _PieceSearch(forecast, start, Random(0)).run(changes)


class _PieceSearch:
    """The best rule so far."""

    def __init__(self, forecast: StepForecast, start: SharedWorkRule, dice: Random) -> None:
        self._forecast, self._dice, self._rule = forecast, dice, start
        self._slices = forecast.groups * forecast.slices_per_group
        self._kinds = [
            [index for index, lane in enumerate(forecast.lanes) if lane == kind]
            for kind in dict.fromkeys(forecast.lanes)
        ]
        self._value = (NEVER_NS, 0)
        self._keep_if_better(start)

    def run(self, changes: int) -> SharedWorkRule:
        for _ in range(changes):
            self._keep_if_better(self._changed())
        return self._rule

    def _keep_if_better(self, rule: SharedWorkRule) -> None:
        """A rule is kept with the pieces that lanes have in fact generated: groups end, and so do their slices."""
        step = self._forecast.run(rule, stop_ns=self._value[0] + 1)
        value = max(step.ends_ns), sum(end_ns * end_ns for end_ns in step.ends_ns)
        if value <= self._value:
            self._rule, self._value = replace(rule, pieces=tuple(map(tuple, step.pieces))), value

    def _changed(self) -> SharedWorkRule:
        dice, pieces = self._dice, list(self._rule.pieces)
        for _ in range(dice.choice((1, 1, 2))):
            if dice.random() < 0.5:
                self._move_slices(pieces)
            else:
                self._cut_again(pieces)
        while (missing := self._slices - sum(map(sum, pieces))) > 0:
            for lane in dice.choices(range(len(pieces)), k=missing):
                self._add_slice(pieces, lane)
        for kind in self._kinds:
            in_order = sorted((pieces[lane] for lane in kind), key=lambda each: (-sum(each), each))
            for lane, of_lane in zip(kind, in_order, strict=True):
                pieces[lane] = of_lane
        leaves = self._rule.leaves_to_faster ^ (dice.random() < OTHER_WAY)
        waits = self._rule.strict ^ (dice.random() < OTHER_WAY)
        return replace(self._rule, pieces=tuple(pieces), leaves_to_faster=leaves, strict=waits)

    def _move_slices(self, pieces: Pieces) -> None:
        """From one lane to another: one slice, or a few."""
        for _ in range(self._dice.choice((1, 1, 2, 3))):
            giver = self._dice.randrange(len(pieces))
            if pieces[giver]:
                self._remove_slice(pieces, giver)
                self._add_slice(pieces, self._dice.randrange(len(pieces)))

    def _cut_again(self, pieces: Pieces) -> None:
        """Gives a run of equal lanes the same pieces, with as many slices as the first one has, or almost."""
        kind = self._dice.choice(self._kinds)
        count = self._dice.randint(1, len(kind))
        first = self._dice.randrange(len(kind) - count + 1)
        total = max(0, sum(pieces[kind[first]]) + self._dice.choice(ANOTHER_TOTAL))
        cut = self._random_cut(total, self._most(kind[0]))
        for lane in kind[first : first + count]:
            pieces[lane] = cut

    def _random_cut(self, total: int, most: int) -> tuple[int, ...]:
        cut: list[int] = []
        while total:
            cut.append(min(most, self._dice.randint(1, total)))
            total -= cut[-1]
        return tuple(cut)

    def _add_slice(self, pieces: Pieces, lane: int) -> None:
        """To one of the lane's pieces, or as a new one."""
        of_lane = list(pieces[lane])
        place = self._dice.randint(0, len(of_lane))
        if place < len(of_lane) and of_lane[place] < self._most(lane):
            of_lane[place] += 1
        else:
            of_lane.append(1)
        pieces[lane] = tuple(of_lane)

    def _remove_slice(self, pieces: Pieces, lane: int) -> None:
        of_lane = list(pieces[lane])
        of_lane[self._dice.randrange(len(of_lane))] -= 1
        pieces[lane] = tuple(piece for piece in of_lane if piece)

    def _most(self, lane: int) -> int:
        return len(self._forecast.lanes[lane].take_ns)
