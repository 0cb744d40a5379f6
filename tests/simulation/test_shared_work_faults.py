"""Lanes that both generate and train, under every kind of loss: each gradient is committed exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import both_contents, evaluation_and_checkpoint

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import RunGaveUpError, drive
from digenrl.records import (
    Action,
    ArtifactLost,
    Commit,
    Committed,
    Encode,
    Event,
    GradientsSent,
    Job,
    SampleId,
    SendGradients,
    Slice,
    Train,
    Trained,
    WorkerLost,
    holding_lane,
)
from digenrl.scheduling import SchedulerState, SharedWorkRule, decide, initial_state
from digenrl.scheduling.invariants import Auditor
from digenrl.scheduling.state import put_lane
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from digenrl.telemetry.recorder import Recorder
from simulation.noisy_cluster import NoisyCluster, losable_lanes
from simulation.random_faults import faults_for
from simulation.test_shared_work import TWO_CARDS

EVENT_NUMBERS = st.integers(1, 120)


class CommittedGradients:
    """Which samples are in the committed weights, from jobs and results alone."""

    def __init__(self, initial: SchedulerState) -> None:
        self._helpers = {lane.index for lane in initial.lanes if lane.helper}
        self._held_jobs: dict[int, Job] = {}
        self._sums: dict[int, list[SampleId]] = defaultdict(list)  # by lane
        self._sent: dict[int, list[SampleId]] = {}  # by job
        self.committed: list[SampleId] = []

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        if isinstance(event, Trained | GradientsSent) and self._held_jobs.get(event.job.lane) == event.job:
            del self._held_jobs[event.job.lane]
            if isinstance(event, Trained):
                self._sums[event.job.lane] += event.job.slice.samples()
            else:
                self._sent[event.job.id] = self._sums.pop(event.job.lane)
        elif isinstance(event, ArtifactLost):
            lane = holding_lane(event.job)
            if lane is not None and self._held_jobs.get(lane) == event.job:
                del self._held_jobs[lane]
            for job_id in event.gradients:
                del self._sent[job_id]
        elif isinstance(event, WorkerLost) and event.pool in ("generator", "trainer"):
            for lane in self._helpers if event.pool == "trainer" else (event.lane,):
                self._held_jobs.pop(lane, None)
                self._sums.pop(lane, None)
        elif isinstance(event, Committed):
            self._commit(event.job)
        for action in actions:
            if isinstance(action, Train | SendGradients):
                self._held_jobs[action.lane] = action

    def _commit(self, job: Commit) -> None:
        for lane in self._helpers:
            self.committed += self._sums.pop(lane, [])
        for job_id in job.gradients:
            self.committed += self._sent.pop(job_id)
        assert not self._sent, "sums were left behind"

    def check(self, initial: SchedulerState) -> None:
        """As many samples as the run has to train, and none of them twice."""
        assert len(self.committed) == len(set(self.committed))
        assert len(self.committed) == initial.terms.steps * initial.terms.samples_per_step


@st.composite
def openings(draw: st.DrawFn, *, evaluates: bool = False) -> SchedulerState:
    """The start of a random run whose lanes share work by a random rule."""
    content = draw(both_contents())
    content["reward"] |= {"batch": draw(st.integers(1, 4)), "lanes": draw(st.integers(0, 2))}
    if evaluates:
        content |= draw(evaluation_and_checkpoint())
    spec = parse_model(Spec, content)
    rule = SharedWorkRule(
        pieces=tuple(map(tuple, draw(st.lists(st.lists(st.integers(1, 4), max_size=3), max_size=8)))),
        slices_at_once=draw(st.integers(1, 4)),
        leaves_to_faster=draw(st.booleans()),
        strict=draw(st.booleans()),
        late_share=draw(st.sampled_from((0.0, 0.5, 1.0))),
    )
    state = initial_scheduler_state(spec, search_budget=0, shared_work=rule)
    return replace(state, terms=replace(state.terms, encodes=draw(st.booleans())))


def run_with_losses(initial: SchedulerState, cluster: NoisyCluster | VirtualCluster) -> None:
    committed = CommittedGradients(initial)
    try:
        final = drive(initial, cluster, (Auditor(initial), committed, Recorder(initial)))
    except RunGaveUpError as error:
        assert "partly trained" in str(error)
        return
    assert final.finished
    committed.check(initial)


@settings(max_examples=60)
@given(openings(evaluates=True), st.integers(0, 10**6))
def test_every_gradient_is_committed_once_with_random_losses(initial: SchedulerState, seed: int) -> None:
    run_with_losses(initial, NoisyCluster(initial, seed))


@settings(max_examples=50)
@given(openings(), st.integers(0, 10**6), st.sets(EVENT_NUMBERS, min_size=1, max_size=3))
def test_the_trainer_may_be_lost_after_any_event(initial: SchedulerState, seed: int, moments: set[int]) -> None:
    run_with_losses(initial, NoisyCluster(initial, seed, dict.fromkeys(moments, WorkerLost(0, 0, "trainer"))))


@settings(max_examples=50)
@given(openings(), st.integers(0, 10**6), st.dictionaries(EVENT_NUMBERS, st.integers(0, 3), max_size=3))
def test_a_lane_may_be_lost_after_any_event(initial: SchedulerState, seed: int, moments: dict[int, int]) -> None:
    lost = {at: WorkerLost(0, lane % losable_lanes(initial)) for at, lane in moments.items()}
    run_with_losses(initial, NoisyCluster(initial, seed, lost))


@settings(max_examples=50)
@given(st.data())
def test_lanes_come_and_go_while_jobs_and_samples_fail(data: st.DataObject) -> None:
    initial = data.draw(openings())
    run_with_losses(initial, VirtualCluster(initial, data.draw(faults_for(initial))))


@pytest.mark.parametrize("committed", [1, 2])
def test_samples_that_a_slow_lane_trained_for_a_committed_step_do_not_count_for_the_next(committed: int) -> None:
    """Its trainer was lost, and the step was trained once more without the lane."""
    content = {**TWO_CARDS, "steps": 2}
    initial = initial_scheduler_state(parse_model(Spec, content), search_budget=1)
    state = initial_state(
        initial.terms,
        initial.costs,
        [initial.lanes[0].offer],
        [initial.lanes[1].offer],
        committed=committed,
    )
    job = Train(0, 0, Slice(0, 0, 0, 1), lane=0)
    busy = put_lane(replace(state, idle=(1,)), replace(state.lanes[0], job=job))
    after, _ = decide(busy, Trained(1, job))
    assert (after.lanes[0].job, after.lanes[0].trained) == (None, ())
    assert after.steps == state.steps


def test_the_prompts_of_a_step_are_encoded_once_as_soon_as_a_lane_waits_for_the_commit_two_steps_before() -> None:
    spec = parse_model(Spec, {**TWO_CARDS, "steps": 4})
    initial = initial_scheduler_state(spec, search_budget=1)
    initial = replace(initial, terms=replace(initial.terms, encodes=True))
    encoded: list[tuple[int, int]] = []  # the step, and the version that was committed then

    class Encodings:
        def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
            jobs = [action for action in actions if isinstance(action, Encode)]
            assert not jobs or not isinstance(event, Committed), "not before the commit"
            assert all(job.groups == (0, 1) for job in jobs)
            encoded.extend((job.step, state.committed) for job in jobs)

    drive(initial, VirtualCluster(initial), (Encodings(),))
    assert encoded == [(2, 0), (3, 1)]
