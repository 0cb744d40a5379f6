"""`earliest_finish`: nobody is handed what another lane would have finished earlier."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from random_specs import spec_contents

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.records import Action, Event, Generate, Lease, Slice, SliceDone
from digenrl.scheduling import SchedulerState, decide
from digenrl.simulation.simulator import simulate
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from simulation.mixed_slices import mixed_contents


class Onlooker:
    """Knows what is unstarted and when each lane is free, from leases alone; judges every one of them."""

    def __init__(self, opening: SchedulerState) -> None:
        self._terms = opening.terms
        self._offers = [lane.offer for lane in opening.lanes if opening.terms.colocated or not lane.helper]
        self._busy_until: dict[int, int] = {}
        self._started: set[tuple[int, int, int]] = set()

    def see(self, event: Event, actions: tuple[Action, ...]) -> None:
        if isinstance(event, SliceDone):
            self._busy_until.pop(event.lease.lane, None)
        for action in actions:
            if isinstance(action, Generate):
                if action.lease.lane < len(self._offers):
                    self._judge(action.lease)
                    self._busy_until[action.lease.lane] = self._end(action.lease)
                size = self._terms.slice_size
                piece = action.lease.slice
                firsts = range(piece.first, piece.first + piece.size, size)
                self._started |= {(piece.step, piece.group, first) for first in firsts}

    def _judge(self, lease: Lease) -> None:
        before = self._standing_before(lease.slice)
        length = lease.slice.size // self._terms.slice_size
        end_ns, by_all = self._end(lease), 0
        for index, offer in enumerate(self._offers):
            if index == lease.lane:
                continue
            free_ns = self._busy_until.get(index, lease.started_ns)
            takes, rest = divmod(before + length, offer.slices_at_once)
            alone_ns = free_ns + takes * offer.slice_ns + (offer.expected_ns(rest) if rest else 0)
            assert alone_ns >= end_ns, f"{offer} would have finished {lease} at {alone_ns}"
            by_all += max(0, (end_ns - free_ns - 1) // offer.slice_ns)
        if all(offer.slices_at_once == 1 for offer in self._offers):
            assert by_all <= before, f"the others would have finished {by_all} slices before {lease}"

    def _end(self, lease: Lease) -> int:
        return lease.started_ns + self._offers[lease.lane].expected_ns(lease.slice.size // self._terms.slice_size)

    def _standing_before(self, piece: Slice) -> int:
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


def looked_on(content: dict[str, Any]) -> None:
    content["policy"]["dispatch"] = "earliest_finish"
    state = initial_scheduler_state(parse_model(Spec, content), search_budget=50)
    cluster, onlooker = VirtualCluster(state), Onlooker(state)
    while not state.finished:
        event = cluster.next_event()
        state, actions = decide(state, event)
        onlooker.see(event, actions)
        for action in actions:
            cluster.submit(action)


@settings(max_examples=300)
@given(spec_contents(helps=("none", "greedy", "auto"), most_samples=32))
def test_the_others_together_would_not_have_finished_a_slice_earlier(content: dict[str, Any]) -> None:
    looked_on(content)


@settings(max_examples=300)
@given(mixed_contents(helps=("none", "greedy", "auto"), most_samples=32))
def test_no_other_lane_would_have_finished_a_piece_earlier_whatever_lanes_take_at_once(
    content: dict[str, Any],
) -> None:
    looked_on(content)


TWO_SPEEDS: dict[str, Any] = {
    "steps": 1,
    "prompts": 3,
    "samples_per_prompt": 4,
    "slice": 1,
    "generators": [{"name": "quick", "seconds": {1: 1}}, {"name": "slow", "seconds": {1: 3.5}}],
    "trainer": {"seconds_per_sample": 1},
}


def test_a_slow_lane_starts_behind_what_the_quick_one_finishes_first() -> None:
    """The quick lane makes three slices while the slow one makes the fourth; group 0 waits for nobody."""
    spec = parse_model(Spec, {**TWO_SPEEDS, "policy": {"dispatch": "earliest_finish"}})
    _, actions = decide(
        initial_scheduler_state(spec, 50), VirtualCluster(initial_scheduler_state(spec, 50)).next_event()
    )
    assert [action.lease.slice for action in actions if isinstance(action, Generate)] == [
        Slice(0, 0, 0, 1),
        Slice(0, 0, 3, 1),
    ]


def test_groups_stream_earlier_than_if_the_slow_lane_took_the_next_slice() -> None:
    """A slow lane of 6 s holds up group 0 until then if it takes the next slice; the quick one has it at 4 s."""
    pools = [{"name": "quick", "seconds": {1: 1}}, {"name": "slow", "seconds": {1: 6}}]
    spec = parse_model(Spec, {**TWO_SPEEDS, "generators": pools})
    assert simulate(spec).answer.makespan == 6 + 3 * 4
    assert simulate(spec.with_rules(dispatch="earliest_finish")).answer.makespan == 4 + 3 * 4
