"""Random faults for simulated runs, and an account of what was trained in spite of them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from digenrl.records import (
    Action,
    Committed,
    Event,
    LaneOffer,
    Quarantine,
    SampleId,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import SchedulerState
from digenrl.simulation.virtual_cluster import Faults
from simulation.noisy_cluster import losable_lanes

SECOND = 1_000_000_000


@st.composite
def faults_for(draw: st.DrawFn, initial: SchedulerState, most_at_once: int = 1) -> Faults:
    """Lanes are lost and join, jobs and scores fail. Some lanes have to be calibrated.

    A fast lane joins last, so that the run can finish.
    """
    terms, moments = initial.terms, st.integers(0, 20 * SECOND)
    lost = draw(st.lists(st.tuples(moments, st.integers(0, losable_lanes(initial) - 1)), max_size=6))
    joined = draw(st.lists(st.tuples(moments, st.integers(1, most_at_once), st.booleans()), max_size=3))
    offers = [
        (at, LaneOffer(f"new-{number}", SECOND, at_once), is_calibrated)
        for number, (at, at_once, is_calibrated) in enumerate((*sorted(joined), (21 * SECOND, most_at_once, True)))
    ]
    joins = [
        WorkerJoined(at, offer if is_calibrated else LaneOffer(offer.name, 0))
        for at, offer, is_calibrated in offers
    ]
    samples = st.builds(
        SampleId, st.integers(0, terms.steps - 1), st.integers(0, terms.prompts), st.integers(0, 7)
    )
    return Faults(
        events=(*(WorkerLost(at, lane) for at, lane in lost), *joins),
        failing_jobs=frozenset(draw(st.sets(st.integers(0, 60), max_size=6))),
        failing_samples=frozenset(draw(st.sets(samples, max_size=3))),
        calibrations={offer.name: offer for _, offer, _ in offers},
    )


class TrainedSamples:
    """Counts which samples are in the committed weights, independently of the scheduler and its auditor."""

    def __init__(self) -> None:
        self.committed: list[SampleId] = []
        self.quarantined_groups: list[tuple[int, int]] = []
        self._open: list[SampleId] = []

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        if isinstance(event, Trained):
            self._open += event.job.slice.samples()
        elif isinstance(event, WorkerLost) and event.pool == "trainer":
            self._open.clear()  # the gradient is lost
        elif isinstance(event, Committed):
            self.committed += self._open
            self._open.clear()
        self.quarantined_groups += [(a.step, a.group) for a in actions if isinstance(a, Quarantine)]

    def check(self, initial: SchedulerState) -> None:
        """Every sample of the run is in the weights exactly once."""
        retired = set(self.quarantined_groups)
        kept = [sample for sample in self.committed if (sample.step, sample.group) not in retired]
        steps = initial.terms.steps - initial.committed
        assert len(kept) == len(set(kept)) == steps * initial.terms.samples_per_step
