"""Simulated workers: jobs take their cost on a virtual clock and come back as results.

At one instant slice ends are reported first, then scores, then the trainer's results, then publications. This
repeats until nothing more is due, and then comes the tick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, ClassVar

from digenrl.records import (
    NO_LANE,
    AbandonEvaluation,
    Action,
    Calibrate,
    Calibrated,
    Commit,
    Committed,
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Event,
    Export,
    Exported,
    Generate,
    Generated,
    GradientsSent,
    JobFailed,
    LaneOffer,
    Publish,
    Published,
    Quarantine,
    Restore,
    Restored,
    Role,
    RoleSwitched,
    SampleId,
    Save,
    Saved,
    Score,
    Scored,
    SendGradients,
    Slice,
    SwitchRole,
    TakeUpdate,
    Tick,
    Train,
    Trained,
    UpdateTaken,
    Wait,
    Wake,
    WorkerJoined,
)
from digenrl.scheduling import Costs, SchedulerState
from digenrl.scheduling.order import positions

SLICE_ENDS, SCORES, TRAINER, PUBLICATIONS = range(4)
FAILURE = "simulated failure"
CALIBRATION_JOBS = 2  # full jobs that a calibration takes: one to warm up, one against the clock


# Jobs that take the same time whatever they hold: their results, and that time.
_TRAINER_JOBS: dict[type[Action], tuple[Callable[[int, Any], Event], Callable[[Costs], int]]] = {
    SendGradients: (GradientsSent, lambda costs: costs.send_ns),
    TakeUpdate: (UpdateTaken, lambda costs: costs.reduce_ns + costs.commit_ns),
    Commit: (Committed, lambda costs: costs.reduce_ns + costs.commit_ns),
    Save: (Saved, lambda costs: costs.save_ns),
    Restore: (Restored, lambda costs: 0),
    Export: (Exported, lambda costs: 0),
}


class StalledError(RuntimeError):
    """No job is under way and the run is not finished."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in a simulated run: events at set times, jobs that fail, samples that cannot be scored."""

    events: tuple[Event, ...] = ()  # WorkerLost, WorkerJoined, ...
    failing_jobs: frozenset[int] = frozenset()
    failing_samples: frozenset[SampleId] = frozenset()
    calibrations: Mapping[str, LaneOffer] = field(default_factory=dict)  # what lanes without known times turn out


class VirtualCluster:
    """Lanes, reward lanes and a trainer that only take time. The clock starts at `start_ns`."""

    def __init__(self, initial: SchedulerState, faults: Faults | None = None, start_ns: int = 0) -> None:
        self.now_ns = start_ns
        self._terms, self._costs = initial.terms, initial.costs
        self._position = positions(initial.terms)
        self._offers = {lane.index: lane.offer for lane in initial.lanes}
        self._roles: dict[int, Role] = {lane.index: lane.role for lane in initial.lanes}
        self._faults = faults or Faults()
        self._due: list[tuple[int, int, tuple[int, int], int, Event]] = []
        self._submitted = 0
        self._ticked = False
        for event in self._faults.events:
            self._report(SLICE_ENDS, event, order=(-1, 0))

    def next_event(self) -> Event:
        """What is due now, else the tick of this instant, else the clock advances."""
        if self._due and self._due[0][0] == self.now_ns:
            self._ticked = False
            return self._pop()
        if not self._ticked:
            self._ticked = True
            return Tick(self.now_ns)
        if not self._due:
            raise StalledError(f"at {self.now_ns / 1e9:g} s no lane is left to continue the run")
        self.now_ns = self._due[0][0]
        self._ticked = False
        return self._pop()

    def submit(self, action: Action) -> None:
        """Starts a job now."""
        if type(action) in _TRAINER_JOBS:
            result, takes_ns = _TRAINER_JOBS[type(action)]
            self._report(TRAINER, result(self.now_ns + takes_ns(self._costs), action))
        else:
            self._START[type(action)](self, action)

    def _pop(self) -> Event:
        event = heappop(self._due)[-1]
        if isinstance(event, WorkerJoined):
            self._offers[len(self._offers)] = self._faults.calibrations.get(event.offer.name, event.offer)
        return event

    def _report(self, phase: int, event: Event, order: tuple[int, int] = (0, 0)) -> None:
        self._submitted += 1
        heappush(self._due, (event.at_ns, phase, order, self._submitted, event))

    def _generate(self, job: Generate) -> None:
        end = self.now_ns + self._offers[job.lane].expected_ns(self._terms.slices_in(job.slice.size))
        if self._terms.shares_work:
            end += self._change_role(job.lane, "generate")
        order = (job.slice.step, self._position(job.slice))
        if job.id in self._faults.failing_jobs:
            self._report(SLICE_ENDS, JobFailed(end, job, FAILURE), order)
            return
        unscorable = not self._terms.scorers and self._is_unscorable(job.slice)
        self._report(SLICE_ENDS, Generated(end, job, job.version, FAILURE if unscorable else ""), order)

    def _evaluate(self, job: Evaluate) -> None:
        self._report(SLICE_ENDS, Evaluated(self.now_ns + self._costs.evaluate_ns, job), (-1, job.chunk.index))

    def _calibrate(self, job: Calibrate) -> None:
        offer = self._offers[job.lane]
        end = self.now_ns + CALIBRATION_JOBS * offer.slice_ns
        self._report(SLICE_ENDS, Calibrated(end, job, offer=offer), (-1, job.lane))

    def _score(self, job: Score) -> None:
        if not isinstance(job.piece, Slice):
            self._report(SCORES, Scored(self.now_ns + self._costs.score_chunk_ns, job))
            return
        end = self.now_ns + self._costs.score_batch_ns(job.piece.size)
        failed = self._is_unscorable(job.piece)
        self._report(SCORES, JobFailed(end, job, FAILURE) if failed else Scored(end, job))

    def _is_unscorable(self, piece: Slice) -> bool:
        return not self._faults.failing_samples.isdisjoint(piece.samples())

    def _train(self, job: Train) -> None:
        if job.lane == NO_LANE:
            takes_ns = self._costs.train_ns(job.slice.size)
        else:
            takes_ns = round(job.slice.size * self._offers[job.lane].train_sample_ns)
            takes_ns //= self._terms.updates_per_group
            takes_ns += self._change_role(job.lane, "train")
        self._report(TRAINER, Trained(self.now_ns + takes_ns, job))

    def _change_role(self, lane: int, role: Role) -> int:
        """The time that it takes."""
        changes, self._roles[lane] = self._roles.get(lane, "generate") != role, role
        offer = self._offers[lane]
        return (offer.switch_in_ns if role == "generate" else offer.switch_out_ns) if changes else 0

    def _publish(self, job: Publish) -> None:
        arrives: dict[int, list[int]] = {}
        for lane in job.lanes:
            arrives.setdefault(self._costs.publication_ns(self._offers[lane].publish_ns), []).append(lane)
        for publish_ns, lanes in arrives.items():
            self._report(PUBLICATIONS, Published(self.now_ns + publish_ns, job, tuple(lanes)))

    def _switch(self, job: SwitchRole) -> None:
        takes_ns = self._costs.switch_in_ns if job.role == "generate" else self._costs.switch_out_ns
        self._report(TRAINER, RoleSwitched(self.now_ns + takes_ns, job))

    def _encode(self, job: Encode) -> None:
        self._report(SLICE_ENDS, Encoded(self.now_ns, job), (-1, 0))

    def _wake(self, action: Wake) -> None:
        self._report(PUBLICATIONS, Tick(action.at_ns))

    def _nothing(self, action: Action) -> None:
        """Takes no time and has no result."""

    _START: ClassVar[dict[type[Action], Callable[[VirtualCluster, Any], None]]] = {
        Encode: _encode,
        Generate: _generate,
        Score: _score,
        Train: _train,
        Publish: _publish,
        SwitchRole: _switch,
        Evaluate: _evaluate,
        Calibrate: _calibrate,
        Wait: _nothing,
        Wake: _wake,
        Quarantine: _nothing,
        AbandonEvaluation: _nothing,
    }
