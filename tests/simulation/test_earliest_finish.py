"""`earliest_finish`: no lane is given a slice that another lane would have finished earlier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import spec_contents

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import Action, Event, Generate, Generated, Slice
from digenrl.scheduling import SchedulerState, decide
from digenrl.scheduling.dispatch import reserved_before
from digenrl.scheduling.help.forecast_from_state import forecast_from_state
from digenrl.simulation.simulator import simulate
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from simulation.mixed_slices import mixed_contents


class DispatchCheck:
    """Derives from jobs alone what is unstarted and when each lane is free, and checks every Generate job."""

    def __init__(self, initial: SchedulerState) -> None:
        self._terms = initial.terms
        self._offers = [lane.offer for lane in initial.lanes if initial.terms.colocated or not lane.helper]
        self._busy_until: dict[int, int] = {}
        self._started: set[tuple[int, int, int]] = set()

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        if isinstance(event, Generated):
            self._busy_until.pop(event.job.lane, None)
        for job in actions:
            if isinstance(job, Generate):
                if job.lane < len(self._offers):
                    self._check(job, state)
                    self._busy_until[job.lane] = self._end(job)
                size, piece = self._terms.slice_size, job.slice
                firsts = range(piece.first, piece.first + piece.size, size)
                self._started |= {(piece.step, piece.group, first) for first in firsts}

    def _check(self, job: Generate, state: SchedulerState) -> None:
        before = self._unstarted_before(job.slice)
        length = job.slice.size // self._terms.slice_size
        end_ns, by_all = self._end(job), 0
        for index, offer in enumerate(self._offers):
            if index == job.lane or state.lanes[index].version < job.version:
                continue  # lanes that do not have the version yet do not count
            free_ns = self._busy_until.get(index, job.issued_ns)
            takes, rest = divmod(before + length, offer.slices_at_once)
            alone_ns = free_ns + takes * offer.slice_ns + (offer.expected_ns(rest) if rest else 0)
            assert alone_ns >= end_ns, f"{offer} would have finished {job} at {alone_ns}"
            by_all += max(0, (end_ns - free_ns - 1) // offer.slice_ns)
        if all(offer.slices_at_once == 1 for offer in self._offers):
            assert by_all <= before, f"the others would have finished {by_all} slices before {job}"

    def _end(self, job: Generate) -> int:
        return job.issued_ns + self._offers[job.lane].expected_ns(job.slice.size // self._terms.slice_size)

    def _unstarted_before(self, piece: Slice) -> int:
        """Unstarted slices before its first one, in the order of the lists."""
        terms = self._terms
        everything = [
            (step, group, first)
            for step in range(piece.step + 1)
            for group in range(terms.prompts)
            for first in range(0, terms.samples_per_prompt, terms.slice_size)
        ]
        if terms.order == "batch":
            everything.sort(key=lambda place: (place[0], place[2], place[1]))
        ahead = everything[: everything.index((piece.step, piece.group, piece.first))]
        return sum(place not in self._started for place in ahead)


def check_dispatch(content: dict[str, Any]) -> None:
    content["policy"]["dispatch"] = "earliest_finish"
    initial = initial_scheduler_state(parse_model(Spec, content), search_budget=50)
    drive(initial, VirtualCluster(initial), (DispatchCheck(initial),))


@settings(max_examples=40)
@given(spec_contents(helps=("none", "greedy", "auto"), most_samples=32))
def test_the_others_together_would_not_have_finished_a_slice_earlier(content: dict[str, Any]) -> None:
    check_dispatch(content)


@settings(max_examples=40)
@given(mixed_contents(helps=("none", "greedy", "auto"), most_samples=32))
def test_no_other_lane_would_have_finished_a_piece_earlier_whatever_lanes_take_at_once(
    content: dict[str, Any],
) -> None:
    check_dispatch(content)


@settings(max_examples=50)
@given(
    mixed_contents(helps=("none",), colocated=False), st.integers(1, 40), st.integers(1, 8), st.integers(0, 9000)
)
def test_forecasts_count_reservations_as_the_scheduler_does(
    content: dict[str, Any], events: int, length: int, within_ms: int
) -> None:
    """After some events of a run, for a piece of this length that a lane would finish within this time."""
    state = initial_scheduler_state(parse_model(Spec, content), search_budget=1)
    cluster = VirtualCluster(state)
    for _ in range(events):
        if state.all_committed:
            return
        future = forecast_from_state(state, cluster.now_ns)
        deadline_ns = cluster.now_ns + within_ms * 1_000_000
        expected = reserved_before(future.generators(), length, deadline_ns)
        able = [True] * len(future.constants.classes)
        assert future.reserved_before(length, deadline_ns, able) == expected
        state, actions = decide(state, cluster.next_event())
        for action in actions:
            cluster.submit(action)


TWO_SPEEDS: dict[str, Any] = {
    "steps": 1,
    "prompts": 3,
    "samples_per_prompt": 4,
    "slice": 1,
    "generators": [{"name": "fast", "seconds": {1: 1}}, {"name": "slow", "seconds": {1: 3.5}}],
    "trainer": {"seconds_per_sample": 1},
}


def test_a_slow_lane_starts_behind_what_the_fast_one_finishes_first() -> None:
    """The fast lane generates three slices while the slow one generates the fourth, so group 0 is not delayed."""
    spec = parse_model(Spec, {**TWO_SPEEDS, "policy": {"dispatch": "earliest_finish"}})
    _, actions = decide(
        initial_scheduler_state(spec, 50), VirtualCluster(initial_scheduler_state(spec, 50)).next_event()
    )
    assert [action.slice for action in actions if isinstance(action, Generate)] == [
        Slice(0, 0, 0, 1),
        Slice(0, 0, 3, 1),
    ]


def test_groups_stream_earlier_than_if_the_slow_lane_took_the_next_slice() -> None:
    """If the slow lane takes the next slice, group 0 is complete at 6 s; by the fast lane alone at 4 s."""
    pools = [{"name": "fast", "seconds": {1: 1}}, {"name": "slow", "seconds": {1: 6}}]
    spec = parse_model(Spec, {**TWO_SPEEDS, "generators": pools})
    assert simulate(spec).answer.makespan == 6 + 3 * 4
    assert simulate(spec.with_rules(dispatch="earliest_finish")).answer.makespan == 4 + 3 * 4
