"""What a run should look like by its own profile: the same opening, driven on a virtual clock.

A live run hands in the terms, costs and slice times it has measured, and compares what it did with what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from digenrl.loop import drive
from digenrl.records import Action, Event, LaneOffer
from digenrl.scheduling import Costs, SchedulerState, Terms, initial_state
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.virtual_cluster import Faults, VirtualCluster
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import Trace


@dataclass(frozen=True, slots=True)
class Prediction:
    """What every lane would do, when each step would be committed, and every decision on the way."""

    trace: Trace
    commit_ends_ns: tuple[int, ...]
    help_decisions: tuple[tuple[int, str], ...]  # (when, "help" or "wait")
    actions: tuple[tuple[int, Action], ...]  # (when, what), in the order in which they were ordered


@dataclass(slots=True)
class ActionLog:
    """An observer that writes down every action with the time at which it was ordered."""

    actions: list[tuple[int, Action]] = field(default_factory=list)

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Called after every decision."""
        self.actions += ((event.at_ns, action) for action in actions)


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
) -> Prediction:
    """The next `steps` optimizer steps of a run that has `committed` so many and whose clock is at `start_ns`.

    All lanes have the newest version, and nothing is under way. `terms.steps` is not looked at: the run ends after
    these steps, so that under stale starts nobody works ahead of the last of them.
    """
    terms = replace(terms, steps=committed + steps)
    opening = initial_state(terms, costs, generators, helpers, committed=committed)
    recorder, log = Recorder(opening, start_ns=start_ns), ActionLog()
    drive(opening, VirtualCluster(opening, faults, start_ns), (recorder, log, Auditor(opening)))
    return Prediction(
        trace=recorder.trace(),
        commit_ends_ns=tuple(recorder.commit_ends_ns),
        help_decisions=tuple(recorder.help_decisions),
        actions=tuple(log.actions),
    )
