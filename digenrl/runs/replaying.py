"""Replays a run's journal: the same events from the same initial state lead to the same actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

from digenrl.records import LaneOffer, Tick
from digenrl.run_folder.journal import Decision, read_journal
from digenrl.scheduling import Costs, RecordedStep, SchedulerState, SharedWorkRule, Terms, decide, initial_state

RECORDED = "recorded"  # what an interrupted run has to repeat, among the facts of the initial state


def initial_facts(state: SchedulerState) -> dict[str, Any]:
    """An initial state as JSON, for run.json."""
    costs = asdict(state.costs) | {"train_sample_ns": str(state.costs.train_sample_ns)}
    lanes = [
        asdict(lane.offer) | {"train_sample_ns": str(lane.train_sample_ns), "helper": lane.helper}
        for lane in state.lanes
    ]
    return {
        "terms": asdict(state.terms),
        "costs": costs,
        "lanes": lanes,
        "committed": state.committed,
        "jobs_issued": state.jobs_issued,
        "evaluates": bool(state.evaluations),
        "served": min(lane.version for lane in state.lanes),
        RECORDED: [asdict(step) for step in state.recorded],
    }


def initial_state_of(facts: dict[str, Any]) -> SchedulerState:
    """The initial state that `initial_facts` describes."""
    costs = Costs(**(facts["costs"] | {"train_sample_ns": Fraction(facts["costs"]["train_sample_ns"])}))
    offers = [(_offer(lane), lane["helper"]) for lane in facts["lanes"]]
    return initial_state(
        _terms(facts["terms"]),
        costs,
        [offer for offer, helper in offers if not helper],
        [offer for offer, helper in offers if helper],
        committed=facts["committed"],
        jobs_issued=facts["jobs_issued"],
        evaluates=facts["evaluates"],
        served=facts.get("served"),
        recorded=recorded_steps(facts.get(RECORDED, ())),
    )


def recorded_steps(facts: Iterable[dict[str, Any]]) -> tuple[RecordedStep, ...]:
    """The records that were written as JSON."""
    return tuple(
        RecordedStep(step["index"], tuple((group, samples) for group, samples in step["stale"]), step["closed"])
        for step in facts
    )


def _terms(facts: dict[str, Any]) -> Terms:
    rule = facts.get("shared_work", {})
    rule = SharedWorkRule(**rule | {"pieces": tuple(map(tuple, rule.get("pieces", ())))})
    places = tuple(facts.get("update_of_place", ()))
    return Terms(**facts | {"shared_work": rule, "update_of_place": places})


def _offer(lane: dict[str, Any]) -> LaneOffer:
    takes = {key: value for key, value in lane.items() if key != "helper"}
    train_sample_ns = Fraction(takes.get("train_sample_ns", 0))
    return LaneOffer(**takes | {"take_ns": tuple(takes.get("take_ns", ())), "train_sample_ns": train_sample_ns})


def replayed(initial: SchedulerState, journal: Path) -> Iterator[tuple[Decision, Decision]]:
    """What the run decided, and what is decided now. Ticks without actions are not in the journal."""
    state = initial
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
