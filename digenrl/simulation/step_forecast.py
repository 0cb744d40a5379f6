"""Predicts the time of one on-policy step in which lanes both generate and train, without jobs and events.

It follows the rules of `scheduling.shared_work` on plain numbers, many times faster than the scheduler itself, so
that a search can compare many rules. Scoring counts as instantaneous, and no lane is lost. Whatever the search
chooses runs on the scheduler itself; a property test keeps the two close.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from digenrl.scheduling import SchedulerState, SharedWorkRule
from digenrl.scheduling.state import idle_rank
from digenrl.units import UNLIMITED

NEVER_NS = 1 << 60


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """The time of a job with 1, 2, ... slices, of a Train job (0: it cannot train), and of a change of role."""

    starts_ns: int  # after the commit, when it has the new version
    take_ns: tuple[int, ...]
    train_ns: int
    switch_in_ns: int
    switch_out_ns: int

    @property
    def full_ns(self) -> int:
        """The time of the largest job that it takes."""
        return self.take_ns[-1]


def lane_times(initial: SchedulerState) -> list[LaneTimes]:
    """The times of all lanes, in their order."""
    terms, costs = initial.terms, initial.costs
    return [
        LaneTimes(
            starts_ns=0 if lane.helper else costs.publication_ns(lane.publish_ns),
            take_ns=tuple(lane.expected_ns(slices) for slices in range(1, lane.slices_at_once + 1)),
            train_ns=lane.train_ns(terms.train_unit) if lane.train_sample_ns else 0,
            switch_in_ns=lane.switch_in_ns,
            switch_out_ns=lane.switch_out_ns,
        )
        for lane in initial.lanes
    ]


@dataclass(frozen=True, slots=True)
class ForecastedStep:
    """By lane: when its last Train job ends, after the commit before, and the pieces that it has generated."""

    ends_ns: list[int]
    pieces: list[list[int]]


class StepForecast:
    """Steps between two commits. Lanes begin in the role of training, as the step before has left them."""

    def __init__(self, initial: SchedulerState) -> None:
        terms, costs = initial.terms, initial.costs
        self.lanes = lane_times(initial)
        self.trainers = [(index, lane) for index, lane in enumerate(self.lanes) if lane.train_ns]
        self.groups, self.slices_per_group = terms.prompts, terms.slices_per_group
        self.jobs_per_group = terms.samples_per_prompt // terms.train_unit
        self.commit_ns = costs.reduce_ns + costs.commit_ns
        fastest_first = sorted(initial.lanes, key=lambda lane: idle_rank(costs, lane))
        # What all lanes together can do in a time, at most. It answers most questions about other lanes.
        self.jobs_per_ns = sum(1 / lane.train_ns for lane in self.lanes if lane.train_ns)
        self.slices_per_ns = sum(len(lane.take_ns) / lane.full_ns for lane in self.lanes)
        self.slices_at_once = sum(len(lane.take_ns) for lane in self.lanes)
        self.rank = {lane.index: place for place, lane in enumerate(fastest_first)}

    def step_ns(self, rule: SharedWorkRule, *, stop_ns: int = 0) -> int:
        """The time from one commit to the next. It may stop early, at any value of at least `stop_ns` if given."""
        return max(self.run(rule, stop_ns=stop_ns).ends_ns) + self.commit_ns

    def run(self, rule: SharedWorkRule, *, stop_ns: int = 0) -> ForecastedStep:
        """Forecasts a step. If a Train job ends at `stop_ns` or later, it may stop early."""
        step = _Step(self, rule)
        step.run(stop_ns or NEVER_NS)
        return ForecastedStep(step.ends_ns, step.pieces)


class _Step:
    """One step under way."""

    def __init__(self, forecast: StepForecast, rule: SharedWorkRule) -> None:
        self.forecast, self.lanes, self.rule = forecast, forecast.lanes, rule
        count = len(self.lanes)
        self.left = [UNLIMITED] * count  # of the quotas
        for lane, pieces in enumerate(rule.pieces[:count]):
            if self.lanes[lane].train_ns:
                self.left[lane] = sum(pieces)
        by_piece = rule.pieces and rule.strict
        self.order: Callable[[int], Any] = self._piece_and_rank if by_piece else forecast.rank.__getitem__
        self.free_ns = [lane.starts_ns for lane in self.lanes]
        self.taken = [0] * count
        self.generates = [not lane.train_ns for lane in self.lanes]  # its role
        self.piece: list[tuple[int, int] | None] = [None] * count  # group and slices that a lane generates
        self.missing = [forecast.slices_per_group] * forecast.groups  # slices that are not generated, by group
        self.group, self.rest = 0, forecast.slices_per_group  # the next slice's group, and what is left of it
        self.unstarted = forecast.groups * forecast.slices_per_group
        self.ready, self.untrained = 0, forecast.groups * forecast.jobs_per_group
        self.due = [(lane.starts_ns, index) for index, lane in enumerate(self.lanes)]
        heapify(self.due)
        self.now_ns, self.ends_ns, self.last_end_ns = 0, [0] * count, 0
        self.pieces: list[list[int]] = [[] for _ in self.lanes]

    def run(self, stop_ns: int) -> None:
        """Until the last Train job ends. An impossible step never ends."""
        idle: list[int] = []
        due, free_ns, piece, missing = self.due, self.free_ns, self.piece, self.missing
        while self.untrained:
            if not due:
                self.ends_ns[0] = self.last_end_ns = NEVER_NS
            if self.last_end_ns >= stop_ns:
                return
            now_ns = self.now_ns = due[0][0]
            while due and due[0][0] == now_ns:
                lane = heappop(due)[1]
                idle.append(lane)
                ended = piece[lane]
                if ended is not None:
                    piece[lane] = None
                    missing[ended[0]] -= ended[1]
                    if not missing[ended[0]]:
                        self.ready += self.forecast.jobs_per_group
            idle.sort(key=self.order)
            busy = [lane for lane in idle if self._offer(lane)]
            for lane in busy:
                heappush(due, (free_ns[lane], lane))
            idle = [lane for lane in idle if free_ns[lane] <= now_ns]

    def _piece_and_rank(self, lane: int) -> tuple[int, int]:
        take_ns = self.lanes[lane].take_ns
        piece = self.rule.next_piece(lane, self.taken[lane]) or len(take_ns)
        return take_ns[min(piece, len(take_ns)) - 1], self.forecast.rank[lane]

    def _offer(self, lane: int) -> bool:
        if self.left[lane]:
            return self._generate(lane) or self._train(lane)
        waits = self.rule.strict and any(self.left)
        return self._train(lane) or (not waits and self._generate(lane))

    def _train(self, lane: int) -> bool:
        times = self.lanes[lane]
        if not self.ready or not times.train_ns:
            return False
        end_ns = self.now_ns + times.train_ns + (times.switch_out_ns if self.generates[lane] else 0)
        if self.rule.leaves_to_faster and not self.unstarted and self._others_train_all(lane, end_ns):
            return False
        self.ready -= 1
        self.untrained -= 1
        self.generates[lane] = False
        self.free_ns[lane] = self.ends_ns[lane] = end_ns
        self.last_end_ns = max(self.last_end_ns, end_ns)
        return True

    def _others_train_all(self, lane: int, end_ns: int) -> bool:
        now_ns, left, free_ns = self.now_ns, self.ready, self.free_ns
        if left > (end_ns - now_ns) * self.forecast.jobs_per_ns:
            return False
        longest_ns = end_ns - 1 - now_ns
        for other, times in self.forecast.trainers:
            if other == lane or times.starts_ns > now_ns:
                continue
            busy_ns = free_ns[other] - now_ns
            time_ns = longest_ns - busy_ns if busy_ns > 0 else longest_ns
            if self.generates[other]:
                time_ns -= times.switch_out_ns
            if time_ns > 0:
                left -= time_ns // times.train_ns
                if left <= 0:
                    return True
        return False

    def _generate(self, lane: int) -> bool:
        if not self.unstarted:
            return False
        times, length = self.lanes[lane], self._slices_at_once(lane)
        end_ns = self.now_ns + times.take_ns[length - 1] + (0 if self.generates[lane] else times.switch_in_ns)
        if self.rule.leaves_to_faster and self._others_generate_all(lane, length, end_ns):
            return False
        self.piece[lane] = (self.group, length)
        self.pieces[lane].append(length)
        self.taken[lane] += length
        if self.left[lane] < UNLIMITED:
            self.left[lane] = max(0, self.left[lane] - length)
        self.unstarted -= length
        self.rest -= length
        if not self.rest:
            self.group, self.rest = self.group + 1, self.forecast.slices_per_group
        self.generates[lane] = True
        self.free_ns[lane] = end_ns
        return True

    def _slices_at_once(self, lane: int) -> int:
        at_once = len(self.lanes[lane].take_ns)
        if at_once == 1:
            return 1
        piece = self.rule.next_piece(lane, self.taken[lane])
        if piece is not None and piece <= at_once:
            return min(self.rest, piece)
        jobs = -(-self.rest // at_once)
        return -(-self.rest // jobs)

    def _others_generate_all(self, lane: int, length: int, end_ns: int) -> bool:
        now_ns, left, free_ns = self.now_ns, self.unstarted, self.free_ns
        if left > (end_ns - now_ns) * self.forecast.slices_per_ns + self.forecast.slices_at_once:
            return False
        strict, longest_ns = self.rule.strict, end_ns - 1 - now_ns
        for other, times in enumerate(self.lanes):
            if other == lane or times.starts_ns > now_ns:
                continue
            quota = self.left[other]
            if not strict and (quota or not self.ready):
                quota = UNLIMITED
            if not quota:
                continue
            at_once = len(times.take_ns)
            busy_ns = free_ns[other] - now_ns
            time_ns = (longest_ns - busy_ns if busy_ns > 0 else longest_ns) - _piece_ns(times, length)
            if not self.generates[other]:
                time_ns -= times.switch_in_ns
            if time_ns >= 0:
                left -= min(quota, (time_ns // times.full_ns + 1) * at_once)
                if left <= 0:
                    return True
        return False


def _piece_ns(times: LaneTimes, slices: int) -> int:
    """The time for this many slices, in full jobs and a last one for the rest."""
    at_once = len(times.take_ns)
    if slices <= at_once:
        return times.take_ns[slices - 1]
    jobs, rest = divmod(slices, at_once)
    return jobs * times.full_ns + (times.take_ns[rest - 1] if rest else 0)
