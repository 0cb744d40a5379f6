"""A runtime with a virtual clock and the manners of a real one.

Every duration strays from what is expected, stamps are a little older than their arrival, versions arrive lane by
lane, answers come late or twice, lanes and scores fail, and what was measured is reported from time to time.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from heapq import heappop, heappush

from digenrl.records import (
    Action,
    Commit,
    Committed,
    CostsMeasured,
    Event,
    Generate,
    Help,
    HelpersReady,
    LaneOffer,
    Publish,
    Published,
    Return,
    SamplesScored,
    Score,
    ScoreFailed,
    SliceDone,
    SliceFailed,
    Tick,
    Train,
    Trained,
    TrainerReturned,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import SchedulerState

SECOND = 1_000_000_000
FACTORS = (0.7, 1.5)
MOST_FAILED_SCORES = 5


class NoisyCluster:
    """Lanes, scorers and a trainer of which nothing is exact; the same seed gives the same run."""

    def __init__(self, opening: SchedulerState, seed: int) -> None:
        self.now_ns = 0
        self._terms, self._costs = opening.terms, opening.costs
        self._dice = random.Random(seed)
        self._offers = {lane.index: lane.offer for lane in opening.lanes}
        self._lost: set[int] = set()
        self._measured: dict[str, list[int]] = defaultdict(list)
        self._due: list[tuple[int, int, Event]] = []
        self._submitted = self._failed_scores = 0
        self._needs_tick = True
        self._plan_losses(len(opening.lanes))

    def _plan_losses(self, lanes: int) -> None:
        """Lanes go and come; at the end a quick one stays, so that every run can finish."""
        dice = self._dice
        for _ in range(dice.randrange(4)):
            self._report(dice.randrange(15 * SECOND), WorkerLost(0, dice.randrange(lanes)))
        for number in range(dice.randrange(3)):
            self._report(dice.randrange(15 * SECOND), WorkerJoined(0, LaneOffer(f"new-{number}", SECOND)))
        self._report(16 * SECOND, WorkerJoined(0, LaneOffer("last", SECOND)))

    # --- What the driver sees --------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """Facts as they arrive; a tick before time passes, and now and then between two facts."""
        quiet = not self._due or self._due[0][0] > self.now_ns
        if self._needs_tick and (quiet or self._dice.random() < 0.5):
            self._needs_tick = False
            return Tick(self.now_ns)
        self._needs_tick = True
        if self._dice.random() < 0.1:
            return self._measurements()
        assert self._due, f"nothing is under way at {self.now_ns} ns"
        at_ns, _, event = heappop(self._due)
        self.now_ns = max(self.now_ns, at_ns)
        self._note(event)
        return replace(event, at_ns=max(0, self.now_ns - self._dice.randrange(SECOND // 1000)))

    def submit(self, action: Action) -> None:
        """Starts the action now."""
        if isinstance(action, Generate):
            self._generate(action)
        elif isinstance(action, Score):
            self._score(action)
        elif isinstance(action, Publish):
            for lane in action.lanes:
                self._answer("publish", self._costs.publish_ns, Published(0, action.version, (lane,)))
        elif isinstance(action, Train):
            samples = sum(piece.size for piece in action.slices)
            self._answer("train", self._costs.train_ns(samples), Trained(0, action.slices), samples)
        elif isinstance(action, Commit):
            self._answer("commit", self._costs.commit_ns, Committed(0, action.step))
        elif isinstance(action, Help):
            self._answer("switch_in", self._costs.switch_in_ns, HelpersReady(0))
        elif isinstance(action, Return):
            self._answer("switch_out", self._costs.switch_out_ns, TrainerReturned(0))

    # --- How things come out ---------------------------------------------------------------------------------

    def _generate(self, action: Generate) -> None:
        lease = action.lease
        if lease.lane in self._lost and self._dice.random() < 0.5:
            return
        done: Event = SliceDone(0, lease)
        if self._dice.random() < 0.05:
            done = SliceFailed(0, lease, "out of luck")
        offer, slices = self._offers[lease.lane], self._terms.slices_in(lease.slice.size)
        what = f"lane {lease.lane}" if slices == offer.slices_at_once else "smaller take"
        self._answer(what, offer.expected_ns(slices), done)
        if self._dice.random() < 0.1:
            self._answer("doubled", 2 * offer.expected_ns(slices), SliceDone(0, lease))

    def _score(self, action: Score) -> None:
        duration_ns = self._costs.score_batch_ns(action.slice.size) if action.scorer >= 0 else 0
        scored: Event = SamplesScored(0, action.slice, action.scorer)
        if self._failed_scores < MOST_FAILED_SCORES and self._dice.random() < 0.05:
            self._failed_scores += 1
            scored = ScoreFailed(0, action.slice, action.scorer, "no number")
        self._answer("score", duration_ns, scored, action.slice.size)
        if self._dice.random() < 0.1:
            self._answer("doubled", 2 * duration_ns + 1, SamplesScored(0, action.slice, action.scorer))

    def _answer(self, what: str, expected_ns: int, event: Event, samples: int = 1) -> None:
        took_ns = round(expected_ns * self._dice.uniform(*FACTORS))
        self._measured[what].append(took_ns // samples)
        self._report(self.now_ns + took_ns, event)

    def _report(self, at_ns: int, event: Event) -> None:
        self._submitted += 1
        heappush(self._due, (at_ns, self._submitted, event))

    def _note(self, event: Event) -> None:
        if isinstance(event, WorkerJoined):
            self._offers[len(self._offers)] = event.offer
        elif isinstance(event, WorkerLost):
            self._lost.add(event.lane)

    def _measurements(self) -> CostsMeasured:
        """Running medians; where nothing was measured yet, what was expected."""
        costs = self._costs
        return CostsMeasured(
            self.now_ns,
            train_sample_ns=Fraction(self._median("train", round(costs.train_sample_ns))),
            commit_ns=self._median("commit", costs.commit_ns),
            publish_ns=self._median("publish", costs.publish_ns),
            switch_in_ns=self._median("switch_in", costs.switch_in_ns),
            switch_out_ns=self._median("switch_out", costs.switch_out_ns),
            score_ns=self._median("score", costs.score_ns),
            lane_slice_ns=tuple(
                (lane, self._median(f"lane {lane}", offer.slice_ns)) for lane, offer in self._offers.items()
            ),
        )

    def _median(self, what: str, expected_ns: int) -> int:
        measured = self._measured[what]
        return int(statistics.median(measured)) if measured else expected_ns
