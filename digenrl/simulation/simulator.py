"""Simulates a SPEC: the production scheduler on a virtual clock, with all invariants checked after every event."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from digenrl.config.limits import SIMULATED_SEARCH_BUDGET
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.scheduling import SchedulerState
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.answer import Answer, bound_seconds
from digenrl.simulation.makespan import schedule_if_lanes_do_both, with_best_slice
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import GENERATOR_POOL, TRAINER_LANE, TRAINER_POOL, Trace, Work
from digenrl.units import NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The SPEC that was run (with its slice size), its result, and the work of every lane."""

    spec: Spec
    answer: Answer
    trace: Trace


def simulate(spec: Spec, search_budget: int = SIMULATED_SEARCH_BUDGET) -> SimulatedRun:
    """Runs a SPEC; `slice: auto` selects the size with the least makespan, the largest of equally good ones.

    With `assist: both` the schedule may turn out to be a simpler one, which is then the SPEC of the result.
    """
    if spec.shares_work:
        schedule = schedule_if_lanes_do_both(spec, search_budget)
        return _run(schedule.spec, schedule.initial_state(search_budget), bound_seconds(spec))
    if spec.slice == "auto":
        spec = with_best_slice(spec, search_budget)
    return _run(spec, initial_scheduler_state(spec, search_budget))


def _run(spec: Spec, initial: SchedulerState, bound: float = inf) -> SimulatedRun:
    """Simulates from the start. `bound` is that of the SPEC that was given, if another one is run."""
    recorder, auditor = Recorder(initial), Auditor(initial)
    drive(initial, VirtualCluster(initial), (recorder, auditor))
    trace = recorder.trace()
    return SimulatedRun(spec, _answer(spec, recorder, auditor, trace, min(bound, bound_seconds(spec))), trace)


def _answer(spec: Spec, recorder: Recorder, auditor: Auditor, trace: Trace, bound: float) -> Answer:
    end_ns = trace.end_ns
    lanes = {lane.name for lane in trace.lanes if lane.pool == GENERATOR_POOL}
    generating_ns = sum(span.end_ns - span.start_ns for span in trace.spans if span.lane in lanes)
    makespan = end_ns / NS_PER_SECOND
    return Answer(
        makespan=makespan,
        step_end=tuple(at / NS_PER_SECOND for at in recorder.commit_ends_ns),
        throughput=spec.steps * spec.prompts * spec.samples_per_prompt / makespan,
        bound=bound,
        efficiency=bound / makespan,
        generator_idle=1 - generating_ns / (len(lanes) * end_ns),
        trainer_idle=_trainer_idle(spec, trace),
        stale_samples=auditor.stale_samples,
        helped_samples=auditor.helped_samples,
        assisted_samples=auditor.assisted_samples,
        help_decisions=tuple((at / NS_PER_SECOND, choice) for at, choice in recorder.help_decisions),
    )


def _trainer_idle(spec: Spec, trace: Trace) -> float:
    """Of the trainer as one unit or, if its cards act alone, of all of them: a commit keeps them all busy."""
    if not spec.shares_work:
        return 1 - _trainer_busy_ns(trace) / trace.end_ns
    cards = {lane.name for lane in trace.lanes if lane.pool == TRAINER_POOL and lane.name != TRAINER_LANE}
    busy_ns = 0
    for span in trace.spans:
        if span.lane in cards:
            busy_ns += span.end_ns - span.start_ns
        elif span.lane == TRAINER_LANE and span.work is not Work.PUBLISH:
            busy_ns += len(cards) * (span.end_ns - span.start_ns)
    return 1 - busy_ns / (len(cards) * trace.end_ns)


def _trainer_busy_ns(trace: Trace) -> int:
    """The busy time of the trainer as one unit: a round of help counts once, until its last slice ends."""
    own = [span for span in trace.spans if span.lane == TRAINER_LANE and span.work is not Work.PUBLISH]
    busy_ns = sum(span.end_ns - span.start_ns for span in own)
    rounds: dict[int, int] = {}
    for span in trace.spans:
        if span.work is Work.HELP:
            rounds[span.start_ns] = max(rounds.get(span.start_ns, 0), span.end_ns)
    return busy_ns + sum(end - start for start, end in rounds.items())
