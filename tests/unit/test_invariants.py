"""The auditor notices every kind of broken promise. Each test breaks one on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.records import (
    Action,
    Calibrate,
    Calibrated,
    Commit,
    Committed,
    Evaluate,
    Evaluated,
    Event,
    Generate,
    Generated,
    HeldOutChunk,
    LaneOffer,
    Publish,
    Published,
    RoleSwitched,
    Save,
    Score,
    Scored,
    Slice,
    SwitchRole,
    Tick,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling.invariants import Auditor, BrokenPromiseError
from digenrl.scheduling.state import SchedulerState
from digenrl.simulation.spec_costs import initial_scheduler_state

FIRST, SECOND, WHOLE = Slice(0, 0, 0, 2), Slice(0, 0, 2, 2), Slice(0, 0, 0, 4)
TRAIN_FIRST, TRAIN_WHOLE = Train(10, 4, FIRST), Train(10, 4, WHOLE)


def opening(scorers: int = 0, **policy: Any) -> SchedulerState:
    content = {
        "steps": 2,
        "prompts": 1,
        "samples_per_prompt": 4,
        "slice": 2,
        "generators": [{"count": 2, "seconds": {2: 4}}],
        "reward": {"lanes": scorers, "seconds": 1, "batch": 2},
        "trainer": {"seconds_per_sample": 1, "helper": {"lanes": 1, "seconds": {2: 4}}},
        "policy": {"help": "auto", **policy},
    }
    return initial_scheduler_state(parse_model(Spec, content), search_budget=10)


def generate(job_id: int, piece: Slice, lane: int = 0, version: int = 0) -> Generate:
    return Generate(job_id, 0, piece, lane, version)


class AuditedEvents:
    """An auditor that is fed invented events and actions."""

    def __init__(self, **options: Any) -> None:
        self.state = opening(**options)
        self.auditor = Auditor(self.state)

    def feed(self, event: Event, *actions: Action) -> AuditedEvents:
        self.auditor.observe(event, actions, self.state)
        return self

    def generated(self) -> AuditedEvents:
        """Both slices of the only group are generated, and scored unless there are reward lanes."""
        jobs = [generate(0, FIRST, lane=0), generate(1, SECOND, lane=1)]
        self.feed(Tick(0), *jobs)
        for job in jobs:
            self.feed(Generated(4, job, version=0))
        return self

    def trained(self, train: Train) -> AuditedEvents:
        """The slices are generated, scored and trained by this job."""
        return self.generated().feed(Tick(4), train).feed(Trained(8, train))


def broken(number: str) -> Any:
    return pytest.raises(BrokenPromiseError, match=f"promise {number}")


def test_a_correct_run_is_accepted() -> None:
    audited = AuditedEvents(scorers=2).generated()
    scores = [Score(2, 4, FIRST, 0), Score(3, 4, SECOND, 1)]
    audited.feed(Tick(4), *scores)
    for score in scores:
        audited.feed(Scored(5, score))
    audited.feed(Tick(5), TRAIN_WHOLE).feed(Trained(8, TRAIN_WHOLE)).feed(Tick(8), Commit(11, 8, 0))


def test_a_sample_generated_twice_is_noticed() -> None:
    with broken("1"):
        AuditedEvents().generated().feed(Tick(4), generate(2, FIRST))


def test_a_sample_generated_by_two_lanes_at_once_is_noticed() -> None:
    with broken("1"):
        AuditedEvents().feed(Tick(0), generate(0, FIRST, lane=0), generate(1, FIRST, lane=1))


def test_a_second_job_for_a_busy_lane_is_noticed() -> None:
    with broken("7"):
        AuditedEvents().feed(Tick(0), generate(0, FIRST), generate(1, SECOND))


def test_a_second_job_for_a_busy_trainer_is_noticed() -> None:
    with broken("7"):
        AuditedEvents().feed(Tick(0), Save(0, 0, 0), SwitchRole(1, 0, "generate"))


def test_a_second_job_for_a_busy_reward_lane_is_noticed() -> None:
    with broken("7"):
        AuditedEvents(scorers=1).generated().feed(Tick(4), Score(2, 4, FIRST, 0), Score(3, 4, SECOND, 0))


def test_work_for_a_lane_that_is_not_calibrated_is_noticed() -> None:
    publish, calibrate = Publish(0, 0, 0, (3,)), Calibrate(1, 0, "generate", lane=3)
    audited = AuditedEvents().feed(WorkerJoined(0, LaneOffer("new", 0)), publish)
    audited.feed(Published(1, publish, (3,)))
    with broken("7"):
        audited.feed(Tick(1), generate(1, FIRST, lane=3))
    audited.feed(Tick(1), replace(calibrate, id=2)).feed(Calibrated(3, replace(calibrate, id=2)))
    audited.feed(Tick(3), generate(3, FIRST, lane=3))


def test_a_job_id_that_is_used_twice_is_noticed() -> None:
    with broken("7"):
        AuditedEvents().feed(Tick(0), generate(3, FIRST, lane=0), generate(3, SECOND, lane=1))


def test_a_job_id_from_before_a_stop_is_noticed() -> None:
    audited = AuditedEvents()
    audited.auditor = Auditor(replace(audited.state, jobs_issued=5))
    with broken("7"):
        audited.feed(Tick(0), generate(4, FIRST))


def test_a_late_result_that_is_used_is_noticed() -> None:
    job = generate(0, FIRST)
    audited = AuditedEvents(scorers=1).feed(Tick(0), job).feed(WorkerLost(1, 0))
    with broken("3"):
        audited.feed(Generated(4, job, version=0), Score(1, 4, FIRST, 0))


def test_a_sample_scored_twice_is_noticed() -> None:
    audited = AuditedEvents(scorers=1).generated().feed(Tick(4), score := Score(2, 4, FIRST, 0))
    with broken("1"):
        audited.feed(Scored(5, score), Score(3, 5, FIRST, 0))


def test_a_sample_trained_twice_is_noticed() -> None:
    audited = AuditedEvents(stream="sample").trained(TRAIN_FIRST)
    with broken("1"):
        audited.feed(Tick(8), replace(TRAIN_FIRST, id=11))


def test_training_without_a_score_is_noticed() -> None:
    with broken("3"):
        AuditedEvents(scorers=1).generated().feed(Tick(4), TRAIN_WHOLE)


def test_a_commit_with_a_missing_sample_is_noticed() -> None:
    audited = AuditedEvents(stream="sample").trained(TRAIN_FIRST)
    with broken("3"):
        audited.feed(Tick(8), Commit(11, 8, 0))


def test_a_sample_of_another_step_in_the_gradient_is_noticed() -> None:
    job = generate(0, Slice(1, 0, 0, 2))
    audited = AuditedEvents(stale_fraction=1).feed(Tick(0), job).feed(Generated(4, job, version=0))
    with broken("3"):
        audited.feed(Tick(4), Train(1, 4, job.slice))


def test_more_stale_samples_than_the_budget_allows_are_noticed() -> None:
    stale = generate(0, Slice(1, 0, 0, 2))
    AuditedEvents(stale_fraction=0.5).feed(Tick(0), stale)
    with broken("2"):
        AuditedEvents(stale_fraction=0.25).feed(Tick(0), stale)


def test_weights_two_versions_behind_are_noticed() -> None:
    with broken("2"):
        AuditedEvents(stale_fraction=1).feed(Tick(0), generate(0, Slice(2, 0, 0, 2)))


def test_a_version_that_the_lane_does_not_serve_is_noticed() -> None:
    with broken("6"):
        AuditedEvents().feed(Tick(0), generate(0, FIRST, version=1))


def test_publishing_anything_but_the_newest_version_is_noticed() -> None:
    with broken("6"):
        AuditedEvents().feed(Tick(0), Publish(0, 0, 3, (0,)))


def test_an_evaluation_with_another_version_is_noticed() -> None:
    with broken("6"):
        AuditedEvents().feed(Tick(0), Evaluate(0, 0, HeldOutChunk(version=1, index=0), lane=0))


def test_a_held_out_chunk_that_is_sampled_twice_is_noticed() -> None:
    first, again = (Evaluate(job_id, 0, HeldOutChunk(version=0, index=0), lane=0) for job_id in (0, 1))
    audited = AuditedEvents().feed(Tick(0), first).feed(Evaluated(4, first), again)
    with broken("1"):
        audited.feed(Evaluated(8, again))


def test_help_that_starts_while_a_group_is_ready_is_noticed() -> None:
    with broken("5"):
        AuditedEvents().generated().feed(Tick(4), SwitchRole(2, 4, "generate"))


def test_training_while_the_trainers_lanes_generate_is_noticed() -> None:
    switch = SwitchRole(0, 0, "generate")
    audited = AuditedEvents().feed(Tick(0), switch).feed(RoleSwitched(1, switch))
    with broken("5"):
        audited.feed(Tick(1), TRAIN_FIRST)


def test_a_commit_that_never_happened_is_noticed() -> None:
    audited = AuditedEvents()
    audited.state = replace(audited.state, committed=1)
    with broken("6"):
        audited.feed(Tick(0))


def test_only_work_on_a_quarantined_group_may_outlive_its_step() -> None:
    commit = Commit(11, 8, 0)
    audited = AuditedEvents().trained(TRAIN_WHOLE).feed(Tick(8), commit)
    audited.feed(Tick(8), generate(12, Slice(0, 1, 0, 2)))
    audited.state = replace(audited.state, committed=1)
    with broken("1"):
        audited.feed(Committed(9, commit))
