"""Lost trainers, reward lanes and artifacts, with evaluations and checkpoints: every sample ends exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import evaluation_and_checkpoint, spec_contents

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import (
    AbandonEvaluation,
    Action,
    ArtifactLost,
    Calibrate,
    Calibrated,
    Commit,
    Committed,
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Event,
    Export,
    Exported,
    Generate,
    HeldOutChunk,
    Job,
    LaneOffer,
    Publish,
    Published,
    Restore,
    Restored,
    Save,
    Saved,
    Score,
    Scored,
    Slice,
    StopRequested,
    SwitchRole,
    Tick,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerRestarted,
)
from digenrl.scheduling import SchedulerState
from digenrl.scheduling.invariants import Auditor
from digenrl.scheduling.state import Free
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from digenrl.telemetry.recorder import Recorder
from simulation.audited_scheduler import AuditedScheduler, generated
from simulation.noisy_cluster import NoisyCluster
from simulation.random_faults import TrainedSamples

HELPS = ("none", "greedy", "search", "auto")
DISPATCHES = ("eager", "earliest_finish")
EVENT_NUMBERS = st.integers(1, 150)


class EvaluationsAndSaves:
    """Counts which chunks were evaluated and which versions were saved, independently of the scheduler."""

    def __init__(self) -> None:
        self.saved: Counter[int] = Counter()
        self._abandoned: Counter[int] = Counter()
        self._done: set[HeldOutChunk] = set()

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        if isinstance(event, Saved):
            self.saved[event.job.step] += 1
        if isinstance(event, Evaluated) and not state.terms.scorers:
            self._done.add(event.job.chunk)
        if isinstance(event, Scored) and isinstance(event.job.piece, HeldOutChunk):
            self._done.add(event.job.piece)
        self._abandoned.update(action.version for action in actions if isinstance(action, AbandonEvaluation))

    def check(self, initial: SchedulerState) -> None:
        """Every evaluation that was due is complete or abandoned, every checkpoint is written."""
        terms = initial.terms
        versions = range(terms.steps + 1)
        assert max(self._abandoned.values(), default=0) <= 1
        for version in versions if terms.evaluate_every else ():
            chunks = {HeldOutChunk(version, index) for index in range(terms.evaluation_chunks)}
            if version == 0 or terms.evaluates(version):
                assert version in self._abandoned or chunks <= self._done
        assert {version for version in versions if version and terms.saves(version)} <= set(self.saved)


@st.composite
def openings(draw: st.DrawFn, **options: Any) -> SchedulerState:
    """The start of a random run with evaluations, checkpoints and reward lanes."""
    content = draw(spec_contents(helps=HELPS, dispatches=DISPATCHES, most_samples=24, **options))
    content["reward"] |= {"batch": draw(st.integers(1, 4)), "lanes": draw(st.integers(0, 2))}
    content |= draw(evaluation_and_checkpoint())
    state = initial_scheduler_state(parse_model(Spec, content), search_budget=50)
    return replace(state, terms=replace(state.terms, encodes=draw(st.booleans())))


def run_with_losses(initial: SchedulerState, cluster: NoisyCluster) -> None:
    trained, evaluations = TrainedSamples(), EvaluationsAndSaves()
    observers = (Auditor(initial), trained, evaluations, Recorder(initial))
    assert drive(initial, cluster, observers).finished
    trained.check(initial)
    evaluations.check(initial)


@settings(max_examples=80)
@given(openings(), st.integers(0, 10**6))
def test_every_run_ends_with_random_losses_evaluations_and_checkpoints(initial: SchedulerState, seed: int) -> None:
    run_with_losses(initial, NoisyCluster(initial, seed))


@settings(max_examples=50)
@given(openings(), st.integers(0, 10**6), st.sets(EVENT_NUMBERS, min_size=1, max_size=3))
def test_the_trainer_may_be_lost_after_any_event(initial: SchedulerState, seed: int, moments: set[int]) -> None:
    lost = dict.fromkeys(moments, WorkerLost(0, 0, "trainer"))
    run_with_losses(initial, NoisyCluster(initial, seed, lost))


@settings(max_examples=50)
@given(openings(), st.integers(0, 10**6), EVENT_NUMBERS)
def test_a_reward_lane_may_be_lost_after_any_event(initial: SchedulerState, seed: int, moment: int) -> None:
    lost = {moment: WorkerLost(0, 0, "reward")} if initial.terms.scorers else {}
    run_with_losses(initial, NoisyCluster(initial, seed, lost))


class StoppedCluster(VirtualCluster):
    """A virtual cluster whose user stops the run after some events."""

    def __init__(self, initial: SchedulerState, after: int) -> None:
        super().__init__(initial)
        self._left = after

    def next_event(self) -> Event:
        self._left -= 1
        return StopRequested(self.now_ns) if self._left == 0 else super().next_event()


@settings(max_examples=50)
@given(openings(), EVENT_NUMBERS)
def test_a_stop_after_any_event_saves_the_newest_version_once(initial: SchedulerState, after: int) -> None:
    saves = EvaluationsAndSaves()
    final = drive(initial, StoppedCluster(initial, after), (Auditor(initial), saves))
    assert final.finished
    assert max(saves.saved.values(), default=0) <= 1
    if initial.terms.save_every:
        assert final.saved == final.committed


# --- Single decisions ------------------------------------------------------------------------------------------


def scheduler(*, encodes: bool = False, **changes: Any) -> AuditedScheduler:
    """Two lanes; two groups of two samples in slices of one."""
    content = {
        "steps": 3,
        "prompts": 2,
        "samples_per_prompt": 2,
        "slice": 1,
        "generators": [{"count": 2, "seconds": {1: 1}}],
        "trainer": {"seconds_per_sample": 0.1},
        **changes,
    }
    state = initial_scheduler_state(parse_model(Spec, content), search_budget=10)
    return AuditedScheduler(replace(state, terms=replace(state.terms, encodes=encodes)))


def generate_step(fed: AuditedScheduler, at_ns: int) -> Train:
    """Generates everything that may start now, without reward lanes. Returns the first Train job."""
    trains: list[Train] = []
    while jobs := fed.feed(Tick(at_ns)).issued(Generate):
        trains += fed.issued(Train)
        fed.feed(*(generated(at_ns, job) for job in jobs))
    return (trains + fed.issued(Train))[0]


def commit_step(fed: AuditedScheduler, at_ns: int) -> Publish:
    """Generates, trains and commits a step. Returns the publication of its version."""
    job: Job = generate_step(fed, at_ns)
    while isinstance(job, Train):
        (job,) = fed.feed(Trained(at_ns, job), Tick(at_ns)).issued(Job)
    assert isinstance(job, Commit)
    (publish,) = fed.feed(Committed(at_ns, job)).issued(Publish)
    return publish


def test_a_lost_trainer_is_restored_and_trains_its_open_step_again() -> None:
    fed = scheduler()
    first = generate_step(fed, 0)
    (second,) = fed.feed(Trained(3, first), Tick(3)).issued(Train)
    (restore,) = fed.feed(WorkerLost(4, 0, "trainer"), Tick(4)).issued(Job)
    assert isinstance(restore, Restore) and restore.version == 0
    (export,) = fed.feed(Restored(5, restore), Tick(5)).issued(Job)
    assert isinstance(export, Export)
    (again,) = fed.feed(Exported(6, export), Tick(6)).issued(Job)
    assert again.slice == first.slice
    (again,) = fed.feed(Trained(7, again), Tick(7)).issued(Job)
    assert again.slice == second.slice


def test_slices_on_the_lanes_of_a_lost_trainer_are_reissued() -> None:
    helper = {"seconds": {1: 9}, "switch_in": 0, "switch_out": 0}
    fed = scheduler(trainer={"seconds_per_sample": 1, "helper": helper}, policy={"help": "greedy"})
    (switch,) = fed.feed(Tick(0)).issued(SwitchRole)
    cluster = VirtualCluster(fed.state)
    cluster.submit(switch)
    helped = fed.feed(cluster.next_event(), Tick(1)).issued(Generate)
    assert [fed.state.lanes[job.lane].helper for job in helped] == [True]
    fed.feed(WorkerLost(2, 0, "trainer"))
    assert helped[0].slice in fed.state.current.reissue


@pytest.mark.parametrize("stream", ["group", "batch"])
def test_a_slice_lost_while_training_is_generated_again_and_the_rest_is_not(stream: str) -> None:
    fed = scheduler(policy={"stream": stream})
    first = generate_step(fed, 0)
    (second,) = fed.feed(Trained(3, first), Tick(3)).issued(Train)
    lost = Slice(0, second.slice.group, 1, 1)
    (again,) = fed.feed(ArtifactLost(4, second, slices=(lost,)), Tick(4)).issued(Job)
    assert isinstance(again, Generate) and again.slice == lost
    (train,) = fed.feed(generated(5, again), Tick(5)).issued(Job)
    assert train.slice == second.slice
    (commit,) = fed.feed(Trained(6, train), Tick(6)).issued(Job)
    assert isinstance(commit, Commit)


def test_a_slice_whose_loss_two_reward_lanes_report_is_generated_again_once() -> None:
    fed = scheduler(slice=2, generators=[{"seconds": {2: 1}}], reward={"lanes": 2, "seconds": 1})
    (job,) = fed.feed(Tick(0)).issued(Generate)
    first, second = fed.feed(generated(1, job)).issued(Score)
    fed.feed(ArtifactLost(2, first, slices=(job.slice,)), ArtifactLost(2, second, slices=(job.slice,)))
    assert fed.state.current.reissue == (job.slice,)
    assert fed.state.scorers == (None, None)


def test_a_score_of_a_lost_slice_is_dropped() -> None:
    fed = scheduler(slice=2, generators=[{"seconds": {2: 1}}], reward={"lanes": 2, "seconds": 1})
    (job,) = fed.feed(Tick(0)).issued(Generate)
    first, second = fed.feed(generated(1, job)).issued(Score)
    fed.feed(ArtifactLost(2, first, slices=(job.slice,)), Scored(3, second))
    assert fed.state.current.groups[0].scored == 0


def test_a_lost_reward_lane_returns_its_samples_to_the_front_of_the_queue() -> None:
    fed = scheduler(reward={"lanes": 1, "seconds": 1})
    first, second = fed.feed(Tick(0)).issued(Generate)
    (score,) = fed.feed(generated(1, first), generated(1, second)).issued(Score)
    assert fed.feed(WorkerLost(2, 0, "reward")).issued(Score) == []
    (again,) = fed.feed(WorkerRestarted(3, 0)).issued(Score)
    assert again.piece == score.piece == first.slice


def test_lost_weights_are_exported_and_published_again_to_the_lanes_that_lack_them() -> None:
    fed = scheduler()
    publish = commit_step(fed, 0)
    fed.feed(Published(9, publish, (0,)))
    (export,) = fed.feed(ArtifactLost(9, publish, weights=True)).issued(Job)
    assert isinstance(export, Export) and export.version == 1
    (again,) = fed.feed(Exported(10, export)).issued(Publish)
    assert (again.version, again.lanes) == (1, (1,))


def test_lost_prompts_are_encoded_once_however_many_jobs_miss_them() -> None:
    fed = scheduler(encodes=True)
    jobs = fed.feed(Tick(0)).issued(Generate)
    (encode,) = fed.feed(*(ArtifactLost(1, job, prompts=((0, 0),)) for job in jobs)).issued(Encode)
    assert (encode.step, encode.groups) == (0, (0,))
    assert fed.feed(Encoded(2, encode)).state.encoding == ()
    assert [job.slice for job in fed.feed(Tick(2)).issued(Generate)] == [job.slice for job in jobs]


EVALUATION = {"evaluation": {"every": 1, "chunks": 2, "chunk": 5}, "policy": {"stale_fraction": 1}}


def test_a_chunk_that_is_lost_with_its_lane_is_sampled_by_another() -> None:
    fed = scheduler(**EVALUATION)
    lost, _ = fed.feed(Tick(0)).issued(Evaluate)
    _, kept = fed.actions
    fed.feed(WorkerLost(1, lost.lane), Evaluated(2, kept), Tick(2))
    assert [(job.chunk, job.lane) for job in fed.issued(Evaluate)] == [(lost.chunk, kept.lane)]


def test_an_evaluation_is_abandoned_if_no_lane_can_serve_its_version() -> None:
    """Both lanes are lost after version 1 is committed; the lane that joins gets version 1 only."""
    fed = scheduler(**EVALUATION)
    first, second = fed.feed(Tick(0)).issued(Evaluate)
    fed.feed(WorkerLost(1, first.lane), Evaluated(2, second), Tick(2))
    (again,) = fed.issued(Evaluate)
    fed.feed(WorkerJoined(2, LaneOffer("new", 1)))
    (publish,) = fed.issued(Publish)
    fed.feed(Published(3, publish, (2,)))
    train = generate_step(fed, 3)
    (train,) = fed.feed(Trained(9, train), Tick(9)).issued(Train)
    (commit,) = fed.feed(Trained(10, train), Tick(10)).issued(Commit)
    assert fed.feed(Committed(11, commit)).issued(Publish) == []
    fed.feed(WorkerLost(12, again.lane))
    assert fed.issued(AbandonEvaluation) == []
    assert [job.lane for job in fed.feed(Tick(12)).issued(Evaluate)] == [2]
    fed.feed(WorkerLost(13, 2))
    assert [action.version for action in fed.issued(AbandonEvaluation)] == [0]


# --- Lanes that join without known times ------------------------------------------------------------------------


def test_a_lane_that_joins_is_calibrated_before_it_gets_slices() -> None:
    fed = scheduler(policy={"stale_fraction": 1})
    fed.feed(Tick(0), WorkerJoined(1, LaneOffer("new", 0)))
    (publish,) = fed.issued(Publish)
    (calibrate,) = fed.feed(Published(1, publish, (2,)), Tick(1)).issued(Job)
    assert isinstance(calibrate, Calibrate) and (calibrate.lane, calibrate.step) == (2, 0)
    assert fed.feed(Tick(2)).actions == (), "it has one job and gets no slice"
    fed.feed(Calibrated(3, calibrate, offer=LaneOffer("new", 3, 2, (2, 3))), Tick(3))
    assert [job.lane for job in fed.issued(Generate)] == [2]
    assert fed.state.lanes[2].offer == LaneOffer("new", 3, 2, (2, 3))


def test_a_calibration_whose_prompt_was_lost_is_issued_again_after_the_prompt_is_encoded() -> None:
    fed = scheduler(encodes=True)
    fed.feed(Tick(0), WorkerJoined(1, LaneOffer("new", 0)), Tick(1))
    (first,), (encode,) = fed.issued(Calibrate), fed.issued(Encode)
    (encode,) = fed.feed(Encoded(1, encode), ArtifactLost(2, first, prompts=((0, 0),)), Tick(2)).issued(Encode)
    (second,) = fed.issued(Calibrate)
    assert (encode.step, encode.groups) == (0, (0,)) and second.lane == first.lane
    fed.feed(Calibrated(3, first, offer=LaneOffer("new", 1)))
    assert not fed.state.lanes[2].calibrated, "a late result is dropped"


def test_a_lane_that_is_lost_while_it_is_calibrated_is_forgotten() -> None:
    fed = scheduler()
    fed.feed(Tick(0), WorkerJoined(1, LaneOffer("new", 0)), Tick(1))
    (calibrate,) = fed.issued(Calibrate)
    fed.feed(WorkerLost(2, 2), Calibrated(3, calibrate, offer=LaneOffer("new", 1)), Tick(3))
    assert fed.issued(Job) == [] and not fed.state.uncalibrated


def test_a_stop_waits_for_the_trainers_job_and_saves() -> None:
    fed = scheduler(checkpoint={"every": 10, "seconds": 1})
    train = generate_step(fed, 0)
    assert fed.feed(StopRequested(3), Tick(3)).actions == ()
    (save,) = fed.feed(Trained(4, train), Tick(4)).issued(Job)
    assert isinstance(save, Save) and save.step == 0
    assert fed.feed(Saved(5, save)).state.finished
    assert isinstance(fed.state.trainer, Free)


def test_a_stop_without_checkpoints_ends_the_run_at_once() -> None:
    assert scheduler().feed(Tick(0), StopRequested(0)).state.finished
