"""The simulated runtime: actions take their cost on a virtual clock and come back as events.

At one instant slice ends are reported first, then scores, then what the trainer completed, then publications;
this repeats until nothing more is due, and then comes the tick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, ClassVar

from digenrl.records import (
    Action,
    Commit,
    Committed,
    Event,
    Generate,
    Help,
    HelpersReady,
    Publish,
    Published,
    Quarantine,
    Return,
    SampleId,
    SamplesScored,
    Score,
    ScoreFailed,
    SliceDone,
    SliceFailed,
    Tick,
    Train,
    Trained,
    TrainerReturned,
    Wait,
    WorkerJoined,
)
from digenrl.scheduling import SchedulerState
from digenrl.scheduling.order import position_of

SLICE_ENDS, SCORES, TRAINER, PUBLICATIONS = range(4)


class StalledError(RuntimeError):
    """Nothing is under way and the run is not finished."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in a simulated run: lanes lost or joined at set times, slices and scores that fail."""

    events: tuple[Event, ...] = ()  # WorkerLost and WorkerJoined
    failing_epochs: frozenset[int] = frozenset()
    failing_samples: frozenset[SampleId] = frozenset()


class VirtualCluster:
    """Lanes, scorers and a trainer that do nothing but take time; the clock starts at `start_ns`."""

    def __init__(self, opening: SchedulerState, faults: Faults | None = None, start_ns: int = 0) -> None:
        self.now_ns = start_ns
        self._terms, self._costs = opening.terms, opening.costs
        self._offers = {lane.index: lane.offer for lane in opening.lanes}
        self._faults = faults or Faults()
        self._due: list[tuple[int, int, tuple[int, int], int, Event]] = []
        self._order_of_submission = 0
        self._ticked = False
        for event in self._faults.events:
            self._report(SLICE_ENDS, event, order=(-1, 0))

    def next_event(self) -> Event:
        """What is due now, else the tick of this instant, else the clock moves on."""
        if self._due and self._due[0][0] == self.now_ns:
            self._ticked = False
            return self._pop()
        if not self._ticked:
            self._ticked = True
            return Tick(self.now_ns)
        if not self._due:
            raise StalledError(f"at {self.now_ns / 1e9:g} s no lane is left that could go on")
        self.now_ns = self._due[0][0]
        self._ticked = False
        return self._pop()

    def submit(self, action: Action) -> None:
        """Starts the action now."""
        self._START[type(action)](self, action)

    def _pop(self) -> Event:
        event = heappop(self._due)[-1]
        if isinstance(event, WorkerJoined):
            self._offers[len(self._offers)] = event.offer
        return event

    def _report(self, phase: int, event: Event, order: tuple[int, int] = (0, 0)) -> None:
        self._order_of_submission += 1
        heappush(self._due, (event.at_ns, phase, order, self._order_of_submission, event))

    def _generate(self, action: Generate) -> None:
        lease = action.lease
        slices = self._terms.slices_in(lease.slice.size)
        end = self.now_ns + self._offers[lease.lane].expected_ns(slices)
        order = (lease.slice.step, position_of(self._terms, lease.slice))
        if lease.epoch in self._faults.failing_epochs:
            self._report(SLICE_ENDS, SliceFailed(end, lease, "simulated failure"), order)
        else:
            self._report(SLICE_ENDS, SliceDone(end, lease), order)

    def _score(self, action: Score) -> None:
        takes_ns = self._costs.score_batch_ns(action.slice.size) if self._terms.scorers else 0
        end = self.now_ns + takes_ns
        if not self._faults.failing_samples.isdisjoint(action.slice.samples()):
            self._report(SCORES, ScoreFailed(end, action.slice, action.scorer, "simulated failure"))
        else:
            self._report(SCORES, SamplesScored(end, action.slice, action.scorer))

    def _train(self, action: Train) -> None:
        samples = sum(piece.size for piece in action.slices)
        self._report(TRAINER, Trained(self.now_ns + self._costs.train_ns(samples), action.slices))

    def _commit(self, action: Commit) -> None:
        self._report(TRAINER, Committed(self.now_ns + self._costs.commit_ns, action.step))

    def _publish(self, action: Publish) -> None:
        end = self.now_ns + self._costs.publish_ns
        self._report(PUBLICATIONS, Published(end, action.version, action.lanes))

    def _help(self, action: Help) -> None:
        self._report(TRAINER, HelpersReady(self.now_ns + self._costs.switch_in_ns))

    def _return(self, action: Return) -> None:
        self._report(TRAINER, TrainerReturned(self.now_ns + self._costs.switch_out_ns))

    def _nothing(self, action: Action) -> None:
        """Takes no time and has no answer."""

    _START: ClassVar[dict[type[Action], Callable[[VirtualCluster, Any], None]]] = {
        Generate: _generate,
        Score: _score,
        Train: _train,
        Commit: _commit,
        Publish: _publish,
        Help: _help,
        Return: _return,
        Wait: _nothing,
        Quarantine: _nothing,
    }
