"""The auditor notices every kind of broken promise: each test breaks one on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.records import (
    Action,
    Commit,
    Committed,
    Event,
    Generate,
    Help,
    Lease,
    Publish,
    SamplesScored,
    Score,
    Slice,
    SliceDone,
    Tick,
    Train,
    Trained,
    WorkerLost,
)
from digenrl.scheduling.invariants import Auditor, BrokenPromiseError
from digenrl.scheduling.state import SchedulerState
from digenrl.simulation.spec_costs import initial_scheduler_state

FIRST, SECOND = Slice(0, 0, 0, 2), Slice(0, 0, 2, 2)


def opening(**policy: Any) -> SchedulerState:
    content = {
        "steps": 2,
        "prompts": 1,
        "samples_per_prompt": 4,
        "slice": 2,
        "generators": [{"count": 2, "seconds": {2: 4}}],
        "trainer": {"seconds_per_sample": 1, "helper": {"lanes": 1, "seconds": {2: 4}}},
        "policy": {"help": "auto", **policy},
    }
    return initial_scheduler_state(parse_model(Spec, content), search_budget=10)


class Story:
    """Feeds an auditor a made-up course of events and actions."""

    def __init__(self, **policy: Any) -> None:
        self.state = opening(**policy)
        self.auditor = Auditor(self.state)

    def tell(self, event: Event, *actions: Action) -> Story:
        self.auditor.observe(event, actions, self.state)
        return self

    def generated(self) -> Story:
        """Both slices of the only group are made."""
        leases = [Lease(FIRST, 0, 0, 0, 0), Lease(SECOND, 1, 1, 0, 0)]
        self.tell(Tick(0), *(Generate(lease) for lease in leases))
        for lease in leases:
            self.tell(SliceDone(4, lease))
        return self

    def scored(self) -> Story:
        self.generated().tell(Tick(4), Score(FIRST, -1), Score(SECOND, -1))
        return self.tell(SamplesScored(4, FIRST, -1)).tell(SamplesScored(4, SECOND, -1))


def test_an_honest_story_is_accepted() -> None:
    story = Story().scored()
    story.tell(Tick(4), Train((Slice(0, 0, 0, 4),))).tell(Trained(8, (Slice(0, 0, 0, 4),))).tell(
        Tick(8), Commit(0)
    )


def broken(number: str) -> Any:
    return pytest.raises(BrokenPromiseError, match=f"promise {number}")


def test_a_sample_made_twice_is_noticed() -> None:
    with broken("1"):
        Story().generated().tell(Tick(4), Generate(Lease(FIRST, 0, 2, 0, 4)))


def test_a_sample_made_by_two_lanes_at_once_is_noticed() -> None:
    with broken("1"):
        Story().tell(Tick(0), Generate(Lease(FIRST, 0, 0, 0, 0)), Generate(Lease(FIRST, 1, 1, 0, 0)))


def test_a_second_slice_for_a_busy_lane_is_noticed() -> None:
    with broken("1"):
        Story().tell(Tick(0), Generate(Lease(FIRST, 0, 0, 0, 0)), Generate(Lease(SECOND, 0, 1, 0, 0)))


def test_a_reused_epoch_is_noticed() -> None:
    with broken("1"):
        Story().tell(Tick(0), Generate(Lease(FIRST, 0, 3, 0, 0)), Generate(Lease(SECOND, 1, 3, 0, 0)))


def test_a_late_answer_that_is_used_is_noticed() -> None:
    lease = Lease(FIRST, 0, 0, 0, 0)
    story = Story().tell(Tick(0), Generate(lease)).tell(WorkerLost(1, 0))
    with broken("3"):
        story.tell(SliceDone(4, lease), Score(FIRST, -1))


def test_a_sample_trained_twice_is_noticed() -> None:
    story = Story(stream="sample").scored().tell(Tick(4), Train((FIRST,))).tell(Trained(5, (FIRST,)))
    with broken("1"):
        story.tell(Tick(5), Train((FIRST,)))


def test_training_without_a_score_is_noticed() -> None:
    with broken("3"):
        Story().generated().tell(Tick(4), Train((Slice(0, 0, 0, 4),)))


def test_a_commit_with_a_missing_sample_is_noticed() -> None:
    story = Story(stream="sample").scored().tell(Tick(4), Train((FIRST,))).tell(Trained(5, (FIRST,)))
    with broken("3"):
        story.tell(Tick(5), Commit(0))


def test_a_sample_of_another_step_in_the_gradient_is_noticed() -> None:
    story = Story(stale_fraction=1)
    lease = Lease(Slice(1, 0, 0, 2), 0, 0, 0, 0)
    story.tell(Tick(0), Generate(lease)).tell(SliceDone(4, lease), Score(lease.slice, -1))
    story.tell(SamplesScored(4, lease.slice, -1))
    with broken("3"):
        story.tell(Tick(4), Train((lease.slice,)))


def test_more_stale_samples_than_the_share_allows_are_noticed() -> None:
    stale = Slice(1, 0, 0, 2)
    Story(stale_fraction=0.5).tell(Tick(0), Generate(Lease(stale, 0, 0, 0, 0)))
    with broken("2"):
        Story(stale_fraction=0.25).tell(Tick(0), Generate(Lease(stale, 0, 0, 0, 0)))


def test_weights_two_versions_behind_are_noticed() -> None:
    with broken("2"):
        Story(stale_fraction=1).tell(Tick(0), Generate(Lease(Slice(2, 0, 0, 2), 0, 0, 0, 0)))


def test_a_version_that_the_lane_does_not_serve_is_noticed() -> None:
    with broken("6"):
        Story().tell(Tick(0), Generate(Lease(FIRST, 0, 0, 1, 0)))


def test_publishing_anything_but_the_newest_version_is_noticed() -> None:
    with broken("6"):
        Story().tell(Tick(0), Publish(3, (0,)))


def test_help_that_begins_while_a_group_is_ready_is_noticed() -> None:
    with broken("5"):
        Story().scored().tell(Tick(4), Help())


def test_training_while_the_trainers_lanes_generate_is_noticed() -> None:
    story = Story().tell(Tick(0), Help())
    with broken("5"):
        story.tell(Tick(1), Train((FIRST,)))


def test_a_commit_that_the_scheduler_made_up_is_noticed() -> None:
    story = Story()
    story.state = replace(story.state, committed=1)
    with broken("6"):
        story.tell(Tick(0))


def test_an_epoch_from_before_a_stop_is_noticed() -> None:
    story = Story()
    story.auditor = Auditor(replace(story.state, jobs_issued=5))
    with broken("1"):
        story.tell(Tick(0), Generate(Lease(FIRST, 0, 4, 0, 0)))


def test_work_on_a_group_that_is_not_in_quarantine_may_not_outlive_its_step() -> None:
    whole = Slice(0, 0, 0, 4)
    story = Story().scored().tell(Tick(4), Train((whole,))).tell(Trained(8, (whole,)), Commit(0))
    story.tell(Tick(8), Generate(Lease(Slice(0, 1, 0, 2), 0, 2, 0, 8)))
    story.state = replace(story.state, committed=1)
    with broken("1"):
        story.tell(Committed(9, 0))
