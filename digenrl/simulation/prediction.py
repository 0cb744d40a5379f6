"""Predicts the next steps of a run from its scheduler terms and costs, on a virtual clock.

A live run passes the costs that it has measured, and compares the prediction with what happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from digenrl.loop import decisions, drive
from digenrl.records import Committed, LaneOffer
from digenrl.scheduling import Costs, SchedulerState, Terms, initial_state
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.virtual_cluster import Faults, VirtualCluster
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import Trace


@dataclass(frozen=True, slots=True)
class PredictedRun:
    """The predicted work of every lane, the time of every commit, and all decisions about help."""

    trace: Trace
    commit_ends_ns: tuple[int, ...]
    help_decisions: tuple[tuple[int, str], ...]  # (at_ns, "help" or "wait")


def predict(
    terms: Terms,
    costs: Costs,
    generators: Sequence[LaneOffer],
    helpers: Sequence[LaneOffer] = (),
    *,
    steps: int,
    committed: int = 0,
    start_ns: int = 0,
    faults: Faults | None = None,
) -> PredictedRun:
    """The next `steps` optimizer steps of a run after `committed` steps, with the clock at `start_ns`.

    All lanes are idle and have the newest version. `terms.steps` is ignored: the predicted run ends after these
    steps, so stale samples of later steps are not generated.
    """
    start = _start(terms, costs, generators, helpers, steps, committed)
    recorder = Recorder(start, start_ns=start_ns)
    drive(start, VirtualCluster(start, faults, start_ns), (recorder, Auditor(start)))
    return PredictedRun(
        trace=recorder.trace(),
        commit_ends_ns=tuple(recorder.commit_ends_ns),
        help_decisions=tuple(recorder.help_decisions),
    )


def predict_commits(
    terms: Terms, costs: Costs, generators: Sequence[LaneOffer], helpers: Sequence[LaneOffer], *, steps: int
) -> Iterator[tuple[int, ...]]:
    """The times of the first `steps` commits that `predict` gives, without its checks and one decision at a time.

    Every item has the commits so far.
    """
    start = _start(terms, costs, generators, helpers, steps)
    commit_ends_ns: tuple[int, ...] = ()
    for event, _ in decisions(start, VirtualCluster(start)):
        if isinstance(event, Committed):
            commit_ends_ns = (*commit_ends_ns, event.at_ns)
        yield commit_ends_ns


def _start(
    terms: Terms,
    costs: Costs,
    generators: Sequence[LaneOffer],
    helpers: Sequence[LaneOffer],
    steps: int,
    committed: int = 0,
) -> SchedulerState:
    terms = replace(terms, steps=committed + steps, hedge_after=0)  # nothing is predicted to be overdue
    return initial_state(terms, costs, generators, helpers, committed=committed)
