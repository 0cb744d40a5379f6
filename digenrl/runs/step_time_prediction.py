"""Predicts the step time of a live run by simulating it with its own measured costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from statistics import fmean

from digenrl.records import Action, Committed, CostsMeasured, Event
from digenrl.scheduling import SchedulerState
from digenrl.simulation.prediction import predict_commits
from digenrl.units import NS_PER_SECOND

SIMULATED_STEPS = 6
STEADY_STEPS = 3  # the last of them, in which the pipeline is full
FIRST_AT, EVERY = 3, 10  # optimizer steps
DECISIONS_PER_EVENT = 10  # a simulation is over within a step of the run


class StepTimePrediction:
    """An observer that regularly calls `on_prediction` with a step and its predicted seconds.

    With hundreds of lanes a simulation takes many seconds, so only a few of its decisions are made at every event.
    While no generator is present, nothing is predicted.
    """

    def __init__(self, on_prediction: Callable[[int, float], None]) -> None:
        self._on_prediction = on_prediction
        self._committed: int | None = None
        self._step = 0
        self._simulation: Iterator[tuple[int, ...]] = iter(())  # of the next steps, from this one on

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        # The costs that a commit measured arrive after it.
        if isinstance(event, Committed):
            self._committed = state.committed
        elif isinstance(event, CostsMeasured) and self._committed is not None:
            committed, self._committed = self._committed, None
            due = (committed == FIRST_AT or committed % EVERY == 0) and not state.finished
            if due and any(lane.calibrated and not lane.helper for lane in state.present_lanes):
                self._step, self._simulation = committed, _simulation(state)
        for commit_ends_ns in islice(self._simulation, DECISIONS_PER_EVENT):
            if len(commit_ends_ns) == SIMULATED_STEPS:
                self._simulation = iter(())
                self._on_prediction(self._step, _steady_step_s(commit_ends_ns))
                return


def predicted_step_s(state: SchedulerState) -> float:
    """The time of a steady-state step with the scheduler's current costs and lanes.

    Evaluations and checkpoints count if every step has one: in a few steps, rarer ones would weigh too much.
    """
    *_, commit_ends_ns = _simulation(state)
    return _steady_step_s(commit_ends_ns)


def _simulation(state: SchedulerState) -> Iterator[tuple[int, ...]]:
    """The times of simulated commits, as they become known."""
    terms = replace(
        state.terms,
        evaluate_every=1 if state.terms.evaluate_every == 1 else 0,
        save_every=1 if state.terms.save_every == 1 else 0,
    )
    offers = [(lane.offer, lane.helper) for lane in state.present_lanes if lane.calibrated]
    generators = [offer for offer, helper in offers if not helper]
    helpers = [offer for offer, helper in offers if helper]
    return predict_commits(terms, state.costs, generators, helpers, steps=SIMULATED_STEPS)


def _steady_step_s(commit_ends_ns: Sequence[int]) -> float:
    steady = [end - start for start, end in pairwise((0, *commit_ends_ns))][-STEADY_STEPS:]
    return fmean(steady) / NS_PER_SECOND
