"""The bound for lanes that do both is never above the best schedule, which tiny SPECs allow to search for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from attainable_bound import attainable_seconds
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import both_contents

from digenrl.config.generator_pools import slice_sizes
from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.scheduling import SharedWorkRule
from digenrl.simulation.answer import bound_seconds
from digenrl.simulation.both_directions import initial_shared_state
from digenrl.simulation.makespan import predict_makespan
from digenrl.simulation.simulator import simulate
from digenrl.simulation.step_forecast import lane_times
from digenrl.units import NS_PER_SECOND

IMPOSSIBLE = float("inf")
TWO_CARDS: dict[str, Any] = {
    "steps": 1,
    "prompts": 2,
    "samples_per_prompt": 2,
    "slice": 1,
    "generators": [{"name": "card", "seconds": {1: 2}, "train_seconds": 3}],
    "trainer": {"seconds_per_sample": 3, "helper": {"lanes": 1, "seconds": {1: 2}}},
    "policy": {"assist": "both", "help": "search"},
}

# A lane: the time until it is free, its role, and (group, slices) that it generates or None.
# A group: slices to start, slices to end, Train jobs to start.
Lane = tuple[int, str, tuple[int, int] | None]
Group = tuple[int, int, int]


class BestStep:
    """The fastest first step, by exhaustive search: an idle lane takes any work, or waits for the next event."""

    def __init__(self, spec: Spec) -> None:
        at_once = spec.samples_per_prompt if spec.slice == "auto" else 1
        self._initial = initial_shared_state(spec, SharedWorkRule(slices_at_once=at_once))
        self._times = lane_times(self._initial)
        self._rest = cache(self._least_rest)

    def seconds(self) -> float:
        terms, costs = self._initial.terms, self._initial.costs
        lanes: tuple[Lane, ...] = tuple(
            (0, "train" if lane.helper else "generate", None) for lane in self._initial.lanes
        )
        slices, jobs = terms.slices_per_group, terms.samples_per_prompt // terms.train_unit
        trained = self._rest(lanes, ((slices, slices, jobs),) * terms.prompts, 0)
        return (trained + costs.reduce_ns + costs.commit_ns) / NS_PER_SECOND

    def _least_rest(self, lanes: tuple[Lane, ...], groups: tuple[Group, ...], turn: int) -> float:
        """The least time until everything is trained, if the lanes before `turn` have decided."""
        if not any(jobs for _, _, jobs in groups):
            return max(busy for busy, role, _ in lanes if role == "train")
        if turn == len(lanes):
            return self._after_next_event(lanes, groups)
        best = self._rest(lanes, groups, turn + 1)
        busy, role, _ = lanes[turn]
        for job, index, changed in () if busy else self._choices(turn, role, groups):
            taken = (*lanes[:turn], job, *lanes[turn + 1 :])
            best = min(best, self._rest(taken, (*groups[:index], changed, *groups[index + 1 :]), turn + 1))
        return best

    def _choices(self, lane: int, role: str, groups: tuple[Group, ...]) -> Iterator[tuple[Lane, int, Group]]:
        own = self._times[lane]
        for index, (unstarted, missing, jobs) in enumerate(groups):
            if groups[index] in groups[:index]:
                continue  # equal groups: one of them is enough
            for slices in range(1, min(unstarted, len(own.take_ns)) + 1):
                switch_ns = own.switch_in_ns if role == "train" else 0
                job: Lane = (switch_ns + own.take_ns[slices - 1], "generate", (index, slices))
                yield job, index, (unstarted - slices, missing, jobs)
            if jobs and not missing and own.train_ns:
                switch_ns = own.switch_out_ns if role == "generate" else 0
                yield (switch_ns + own.train_ns, "train", None), index, (unstarted, missing, jobs - 1)

    def _after_next_event(self, lanes: tuple[Lane, ...], groups: tuple[Group, ...]) -> float:
        step = min((busy for busy, _, _ in lanes if busy), default=0)
        if not step:
            return IMPOSSIBLE
        ended = Counter[int]()
        for busy, _, piece in lanes:
            if busy == step and piece is not None:
                ended[piece[0]] += piece[1]
        later = tuple((max(0, busy - step), role, piece if busy > step else None) for busy, role, piece in lanes)
        changed = tuple(
            (unstarted, missing - ended[index], jobs) for index, (unstarted, missing, jobs) in enumerate(groups)
        )
        return step + self._rest(later, changed, 0)


@st.composite
def tiny_specs(draw: st.DrawFn) -> Spec:
    """One step of up to six samples on two or three lanes, which may be unequal."""
    content = draw(both_contents(helps=("search",)))
    prompts, group = draw(st.sampled_from([(1, 2), (2, 2), (1, 4), (3, 2), (2, 3)]))
    job = draw(st.sampled_from([size for size in (1, 2, 3) if group % size == 0]))
    content |= {"steps": 1, "prompts": prompts, "samples_per_prompt": group, "reward": {}, "slice": "auto"}
    content["generators"] = content["generators"][:1]
    content["generators"][0]["count"] = 1
    content["trainer"]["helper"]["lanes"] = draw(st.integers(1, 2)) if prompts * group < 6 else 1
    content["trainer"]["job"] = job
    return parse_model(Spec, content)


@settings(max_examples=30, deadline=None)
@given(tiny_specs())
def test_no_schedule_is_faster_than_the_bound(spec: Spec) -> None:
    assert bound_seconds(spec) <= attainable_seconds(spec) * (1 + 1e-9)
    assert attainable_seconds(spec) <= BestStep(spec).seconds() * (1 + 1e-9)


@st.composite
def specs_with_any_slice(draw: st.DrawFn) -> Spec:
    content = draw(both_contents(helps=("greedy", "search")))
    group = content["samples_per_prompt"]
    content["slice"] = draw(st.sampled_from([*slice_sizes(group), "auto"]))
    return parse_model(Spec, content)


@settings(max_examples=10, deadline=None)
@given(specs_with_any_slice())
def test_no_simulated_run_is_faster_than_the_bound(spec: Spec) -> None:
    assert attainable_seconds(spec) <= predict_makespan(spec) * (1 + 1e-9)
    assert simulate(spec).answer.efficiency <= 1 + 1e-9


SIX_IS_FASTEST = {1: 0.5, 2: 0.7, 3: 0.9, 4: 1.4, 6: 1.5, 8: 2.9}
THREE_IS_FASTEST = {1: 9, 2: 10, 3: 1, 4: 9}


@pytest.mark.parametrize(
    "changes",
    [
        {  # lanes take any number of samples
            "samples_per_prompt": 8,
            "slice": "auto",
            "generators": [{"seconds": SIX_IS_FASTEST, "train_seconds": 0.01}],
            "trainer": {"seconds_per_sample": 0.01, "helper": {"seconds": {1: 50}}},
        },
        {  # one pool takes what the other leaves of a group
            "samples_per_prompt": 4,
            "generators": [{"seconds": {1: 1}}, {"name": "second", "seconds": THREE_IS_FASTEST, "slice": 4}],
            "trainer": {"seconds_per_sample": 0.01},
            "policy": {},
        },
    ],
    ids=["any number", "rest of a group"],
)
def test_the_bound_counts_numbers_of_samples_that_do_not_divide_a_group(changes: dict[str, Any]) -> None:
    assert simulate(parse_model(Spec, {**TWO_CARDS, **changes})).answer.efficiency <= 1 + 1e-9


@pytest.mark.parametrize(
    ("changes", "fluid", "attainable"),
    [
        ({}, 10, 10),  # both cards are always busy
        ({"prompts": 1, "samples_per_prompt": 3}, 7.5, 10),  # 4 s until the group is complete, 6 s of training
        ({"prompts": 1, "trainer": {**TWO_CARDS["trainer"], "job": 2}}, 5, 8),  # one job, on one card
    ],
)
def test_the_bound_counts_whole_samples_and_jobs(changes: dict[str, Any], fluid: float, attainable: float) -> None:
    spec = parse_model(Spec, {**TWO_CARDS, **changes})
    assert bound_seconds(spec) == pytest.approx(fluid)
    assert attainable_seconds(spec) == pytest.approx(attainable)
    assert BestStep(spec).seconds() == pytest.approx(attainable)


def test_later_steps_begin_with_the_publication() -> None:
    spec = parse_model(Spec, {**TWO_CARDS, "publish": 100})
    assert attainable_seconds(spec) == pytest.approx(10)
    # The trainer's card alone: four samples of 2 s, and as many of 3 s.
    assert attainable_seconds(spec.with_changes(steps=3)) == pytest.approx(10 + 2 * 20)
