"""What the simulator says about the run under way, from the run's own measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from digenrl.records import Action, Committed, CostsMeasured, Event
from digenrl.scheduling import SchedulerState
from digenrl.simulation.prediction import predict

FORESEEN_STEPS = 6
SETTLED_STEPS = 3  # the last of them, in which the pipeline is full
FIRST_LOOK, EVERY = 3, 10  # optimizer steps
NS_PER_SECOND = 1_000_000_000


class StepTimePrediction:
    """An observer that predicts the time of a step every so often, for `on_prediction`: step and seconds."""

    def __init__(self, on_prediction: Callable[[int, float], None]) -> None:
        self._on_prediction = on_prediction
        self._committed: int | None = None

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """After a commit, as soon as the costs are known that it brought."""
        if isinstance(event, Committed):
            self._committed = state.committed
        elif isinstance(event, CostsMeasured) and self._committed is not None:
            committed, self._committed = self._committed, None
            if (committed == FIRST_LOOK or committed % EVERY == 0) and not state.finished:
                self._on_prediction(committed, predicted_step_s(state))


def predicted_step_s(state: SchedulerState) -> float:
    """The time of a settled step with the costs that the scheduler counts on now, and the lanes that are there."""
    present = [lane for lane in state.lanes if lane.present]
    offers = [(lane.offer, lane.helper) for lane in present]
    foreseen = predict(
        state.terms,
        state.costs,
        [offer for offer, helper in offers if not helper],
        [offer for offer, helper in offers if helper],
        steps=FORESEEN_STEPS,
    )
    ends = (0, *foreseen.commit_ends_ns)
    settled = [later - sooner for sooner, later in pairwise(ends)][-SETTLED_STEPS:]
    return fmean(settled) / NS_PER_SECOND
