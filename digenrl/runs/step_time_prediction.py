"""Predicts the step time of a live run by simulating it with its own measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from digenrl.records import Action, Committed, CostsMeasured, Event
from digenrl.scheduling import SchedulerState
from digenrl.simulation.prediction import predict
from digenrl.units import NS_PER_SECOND

SIMULATED_STEPS = 6
STEADY_STEPS = 3  # the last of them, in which the pipeline is full
FIRST_AT, EVERY = 3, 10  # optimizer steps


class StepTimePrediction:
    """An observer that regularly calls `on_prediction` with a step and its predicted seconds."""

    def __init__(self, on_prediction: Callable[[int, float], None]) -> None:
        self._on_prediction = on_prediction
        self._committed: int | None = None

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        # The costs that a commit measured arrive after it.
        if isinstance(event, Committed):
            self._committed = state.committed
        elif isinstance(event, CostsMeasured) and self._committed is not None:
            committed, self._committed = self._committed, None
            if (committed == FIRST_AT or committed % EVERY == 0) and not state.finished:
                self._on_prediction(committed, predicted_step_s(state))


def predicted_step_s(state: SchedulerState) -> float:
    """The time of a steady-state step with the scheduler's current costs and lanes.

    Evaluations and checkpoints count if every step has one: in a few steps, rarer ones would weigh too much.
    """
    terms = replace(
        state.terms,
        evaluate_every=1 if state.terms.evaluate_every == 1 else 0,
        save_every=1 if state.terms.save_every == 1 else 0,
    )
    present = [lane for lane in state.present_lanes if lane.calibrated]
    offers = [(lane.offer, lane.helper) for lane in present]
    prediction = predict(
        terms,
        state.costs,
        [offer for offer, helper in offers if not helper],
        [offer for offer, helper in offers if helper],
        steps=SIMULATED_STEPS,
    )
    ends = (0, *prediction.commit_ends_ns)
    steady = [end - start for start, end in pairwise(ends)][-STEADY_STEPS:]
    return fmean(steady) / NS_PER_SECOND
