"""The numbers of a run: one flat mapping per optimizer step and one per evaluation, handed to every sink."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from digenrl.metrics.busy import BusyMeter
from digenrl.records import (
    Action,
    Commit,
    Committed,
    Event,
    Generate,
    Generated,
    Quarantine,
    Result,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import SchedulerState
from digenrl.telemetry.trace import Span

NS_PER_SECOND = 1_000_000_000
BUSY_PREFIX = "busy/"
_COUNTED_HERE = {"step", "at_s", "step_s", "samples", "samples_per_s", "stale_share", "helped_share", "version"}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How the model does on held-out prompts after `steps_done` optimizer steps.

    `numbers` has "reward_mean" and "reward/<part>"; `grid` is the picture's path inside the run's folder.
    """

    steps_done: int
    at_s: float
    count: int
    numbers: Mapping[str, float]
    grid: str | None = None


class MetricSink(Protocol):
    """Somewhere that numbers go. What is not a finite number reaches it as it is."""

    def step(self, numbers: Mapping[str, float]) -> None:
        """One optimizer step; "step" counts from 0, "version" is the optimizer steps done."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """One evaluation."""

    def close(self) -> None:
        """Nothing comes after it."""


class StepMetrics:
    """An observer that counts what a step was like, and puts it together with what others report about the step.

    It comes after the recorder among the observers and gets its spans: a step ends with the span of its commit.
    A run that goes on after a stop begins its first step at `begin_ns`.
    """

    def __init__(self, opening: SchedulerState, sinks: Sequence[MetricSink], begin_ns: int = 0) -> None:
        self._sinks = tuple(sinks)
        self._busy = BusyMeter(opening, begin_ns)
        self._help = _HelpTally(opening)
        self._began_ns = begin_ns
        self._step = opening.committed
        self._stale_samples = 0
        self._reported: dict[int, dict[str, float]] = {}

    def add_span(self, span: Span) -> None:
        """A span of the trace that has closed."""
        self._busy.add(span)

    def report(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Numbers that belong to a step; None is left out, a name reported again replaces the earlier number.

        They are written when the step is committed. What comes later than that, as the time that publishing took,
        stands in the line of the next step, during which it was measured.
        """
        counted = sorted(name for name in numbers if name in _COUNTED_HERE or name.startswith(BUSY_PREFIX))
        assert not counted, f"{counted} are counted here and cannot be reported"
        known = {name: number for name, number in numbers.items() if number is not None}
        self._reported.setdefault(max(step, self._step), {}).update(known)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Hands an evaluation on to every sink."""
        for sink in self._sinks:
            sink.evaluation(evaluation)

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Counts; at a commit hands the step's numbers to every sink."""
        if isinstance(event, WorkerJoined):
            self._busy.joined(event.offer.name, event.at_ns)
        elif isinstance(event, WorkerLost) and event.pool == "generator":
            self._busy.left(state.lanes[event.lane].name, event.at_ns)
        self._help.observe(event, actions)
        if any(isinstance(action, Commit) for action in actions):
            self._stale_samples = state.current.stale_samples
        if isinstance(event, Committed):
            self._finish_step(event, state)

    def close(self) -> None:
        """Closes the sinks."""
        for sink in self._sinks:
            sink.close()

    def _finish_step(self, event: Committed, state: SchedulerState) -> None:
        step, samples, step_s = (
            event.job.step,
            state.terms.samples_per_step,
            (event.at_ns - self._began_ns) / NS_PER_SECOND,
        )
        numbers: dict[str, float] = {
            "step": step,
            "at_s": event.at_ns / NS_PER_SECOND,
            "step_s": step_s,
            "samples": samples,
            "stale_share": self._stale_samples / samples,
            "helped_share": self._help.take(step) / samples,
            "version": state.committed,
        }
        if step_s > 0:
            numbers["samples_per_s"] = samples / step_s
        numbers |= self._reported.pop(step, {})
        shares = self._busy.next_window(event.at_ns, _under_way(state))
        numbers |= {f"{BUSY_PREFIX}{lane}": share for lane, share in shares.items()}
        self._began_ns, self._step = event.at_ns, step + 1
        for sink in self._sinks:
            sink.step(numbers)


def _under_way(state: SchedulerState) -> Iterator[tuple[str, int]]:
    """What generators and scorers are at, and since when; at a commit the trainer is at nothing."""
    for lane in state.lanes:
        if lane.job is not None:
            yield lane.name, lane.job.issued_ns
    for index, job in enumerate(state.scorers):
        if job is not None:
            yield f"reward-{index}", job.issued_ns


class _HelpTally:
    """How many samples of each open step the trainer's own lanes made; groups in quarantine do not count."""

    def __init__(self, opening: SchedulerState) -> None:
        colocated = opening.terms.colocated
        self._helpers = {lane.index for lane in opening.lanes if lane.helper and not colocated}
        self._jobs: dict[int, Generate] = {}  # by id; late and doubled results are of none
        self._made: dict[tuple[int, int], int] = {}  # samples, by step and group

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, Result):
            job = self._jobs.pop(event.job.id, None)
            if job is not None and isinstance(event, Generated):
                place = (job.slice.step, job.slice.group)
                self._made[place] = self._made.get(place, 0) + job.slice.size
        elif isinstance(event, WorkerLost) and event.pool == "trainer":
            self._jobs.clear()
        for action in actions:
            if isinstance(action, Generate) and action.lane in self._helpers:
                self._jobs[action.id] = action
            elif isinstance(action, Quarantine):
                self._forget(action.step, action.group)

    def take(self, step: int) -> int:
        """The samples of a step that is committed, which is then forgotten with all before it."""
        samples = sum(made for (of_step, _), made in self._made.items() if of_step == step)
        self._made = {place: made for place, made in self._made.items() if place[0] > step}
        return samples

    def _forget(self, step: int, group: int) -> None:
        self._made.pop((step, group), None)
        self._jobs = {
            job_id: job for job_id, job in self._jobs.items() if (job.slice.step, job.slice.group) != (step, group)
        }
