"""Replays a run's journal: the same events from the same initial state lead to the same actions."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

from digenrl.records import LaneOffer, Tick
from digenrl.run_folder.journal import Decision, read_journal
from digenrl.runs.initial_facts import RECORDED, recorded_steps
from digenrl.scheduling import Costs, SchedulerState, SharedWorkRule, Terms, decide, initial_state


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
        evaluations=facts["evaluations"],
        served=facts.get("served"),
        recorded=recorded_steps(facts.get(RECORDED, ())),
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
