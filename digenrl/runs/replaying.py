"""A run's journal, decided again: the same events from the same opening give the same actions, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

from digenrl.records import LaneOffer, Tick
from digenrl.run_folder.journal import Decision, read_journal
from digenrl.scheduling import Costs, SchedulerState, Terms, decide, initial_state


def opening_facts(state: SchedulerState) -> dict[str, Any]:
    """An opening as JSON can hold it, for run.json."""
    costs = asdict(state.costs) | {"train_sample_ns": str(state.costs.train_sample_ns)}
    lanes = [asdict(lane.offer) | {"helper": lane.helper} for lane in state.lanes]
    return {
        "terms": asdict(state.terms),
        "costs": costs,
        "lanes": lanes,
        "committed": state.committed,
        "leases_issued": state.leases_issued,
    }


def opening_of(facts: dict[str, Any]) -> SchedulerState:
    """The opening that `opening_facts` wrote down."""
    costs = Costs(**(facts["costs"] | {"train_sample_ns": Fraction(facts["costs"]["train_sample_ns"])}))
    offers = [(_offer(lane), lane["helper"]) for lane in facts["lanes"]]
    return initial_state(
        Terms(**facts["terms"]),
        costs,
        [offer for offer, helper in offers if not helper],
        [offer for offer, helper in offers if helper],
        committed=facts["committed"],
        leases_issued=facts["leases_issued"],
    )


def _offer(lane: dict[str, Any]) -> LaneOffer:
    takes = {key: value for key, value in lane.items() if key != "helper"}
    return LaneOffer(**takes | {"take_ns": tuple(takes.get("take_ns", ()))})


def replayed(opening: SchedulerState, journal: Path) -> Iterator[tuple[Decision, Decision]]:
    """What the run decided, and what is decided now; ticks that led to nothing are not in the journal."""
    state = opening
    for at_ns, instant in groupby(read_journal(journal), key=lambda decision: decision.event.at_ns):
        ticked = False
        for decision in instant:
            ticked = isinstance(decision.event, Tick)
            state, actions = decide(state, decision.event)
            yield decision, Decision(decision.event, actions)
        if not ticked:
            tick = Tick(at_ns)
            state, actions = decide(state, tick)
            yield Decision(tick, ()), Decision(tick, actions)
