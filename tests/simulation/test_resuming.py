"""A run that stops after a commit and goes on: on-policy, the two halves are the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import spec_contents

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import Generate, LaneOffer, Publish, SliceDone, Tick
from digenrl.scheduling import SchedulerState, decide, initial_state
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.prediction import ActionLog
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import Span, Work

HELPS = ("none", "greedy", "search", "auto")


def reopened(opening: SchedulerState, committed: int, jobs_issued: int) -> SchedulerState:
    """What a run of the same settings starts with after so many commits."""
    offers = {
        helper: [LaneOffer(lane.name, lane.slice_ns) for lane in opening.lanes if lane.helper is helper]
        for helper in (False, True)
    }
    return initial_state(
        opening.terms,
        opening.costs,
        offers[False],
        offers[True],
        committed=committed,
        jobs_issued=jobs_issued,
    )


class Story:
    """A driven and audited run: its spans, its help decisions and its orders, as an outsider sees them."""

    def __init__(self, opening: SchedulerState, start_ns: int = 0) -> None:
        recorder, log = Recorder(opening, start_ns=start_ns), ActionLog()
        cluster = VirtualCluster(opening, start_ns=start_ns)
        self.final = drive(opening, cluster, (recorder, log, Auditor(opening)))
        self.trace = recorder.trace()
        self.spans = [span for span in self.trace.spans if span.work is not Work.PUBLISH]
        self.orders = [(at, action) for at, action in log.actions if not isinstance(action, Publish)]
        self.decisions, self.commits_ns = recorder.help_decisions, recorder.commit_ends_ns


def stopped_and_gone_on(opening: SchedulerState, after: int, pause_ns: int) -> tuple[Story, Story]:
    """The run up to a commit, and the rest of it from `pause_ns` after that commit."""
    first = Story(replace(opening, terms=replace(opening.terms, steps=after)))
    rest = reopened(opening, after, first.final.jobs_issued)
    return first, Story(rest, start_ns=first.commits_ns[-1] + pause_ns)


def by_start(*stories: Story) -> list[Span]:
    return sorted(
        (span for story in stories for span in story.spans), key=lambda span: (span.start_ns, repr(span))
    )


def assert_the_halves_are_the_whole(whole: Story, *halves: Story) -> None:
    assert by_start(*halves) == by_start(whole)
    assert [order for half in halves for order in half.orders] == whole.orders
    assert [decision for half in halves for decision in half.decisions] == whole.decisions
    assert [end for half in halves for end in half.commits_ns] == whole.commits_ns


@settings(max_examples=150)
@given(spec_contents(helps=HELPS, dispatches=("eager", "earliest_finish"), colocated=False), st.integers(1, 2))
def test_on_policy_with_free_publishing_a_stop_leaves_no_trace(content: dict[str, Any], after: int) -> None:
    """At a commit every lane is idle; with nothing to pay for publishing, all of them have the version too."""
    content["policy"]["stale_fraction"], content["publish"], content["steps"] = 0, 0, 3
    opening = initial_scheduler_state(parse_model(Spec, content), search_budget=20_000)
    assert_the_halves_are_the_whole(Story(opening), *stopped_and_gone_on(opening, after, pause_ns=0))


@settings(max_examples=80)
@given(spec_contents(helps=("none",), dispatches=("eager", "earliest_finish"), colocated=False))
def test_without_help_a_run_that_goes_on_when_the_version_would_have_arrived_is_the_same(
    content: dict[str, Any],
) -> None:
    """A trainer that may help uses the time of publishing; one that may not has nothing to do in it."""
    content["policy"]["stale_fraction"], content["steps"] = 0, 3
    opening = initial_scheduler_state(parse_model(Spec, content), search_budget=100)
    halves = stopped_and_gone_on(opening, after=1, pause_ns=opening.costs.publish_ns)
    assert_the_halves_are_the_whole(Story(opening), *halves)


@settings(max_examples=80)
@given(spec_contents(helps=HELPS), st.integers(0, 2))
def test_every_run_can_go_on_after_a_stop_and_keeps_its_promises(content: dict[str, Any], after: int) -> None:
    content["steps"] = 3
    opening = initial_scheduler_state(parse_model(Spec, content), search_budget=200)
    story = Story(reopened(opening, after, jobs_issued=1000), start_ns=50)
    assert story.final.finished
    assert [span.step for span in story.spans if span.work is Work.GENERATE and span.step < after] == []
    assert len(story.commits_ns) == 3 - after
    assert min(span.start_ns for span in story.spans) >= 50


def small_opening(committed: int = 0, jobs_issued: int = 0) -> SchedulerState:
    content = {
        "steps": 4,
        "prompts": 2,
        "samples_per_prompt": 2,
        "slice": 1,
        "generators": [{"count": 2, "seconds": {1: 1}}],
        "trainer": {"seconds_per_sample": 1},
    }
    return reopened(initial_scheduler_state(parse_model(Spec, content), search_budget=1), committed, jobs_issued)


def test_steps_and_versions_keep_their_numbers() -> None:
    opening = small_opening(committed=2, jobs_issued=7)
    _, actions = decide(opening, Tick(0))
    leases = [action.lease for action in actions if isinstance(action, Generate)]
    assert [(lease.slice.step, lease.version, lease.epoch) for lease in leases] == [(2, 2, 7), (2, 2, 8)]


def test_the_last_step_has_none_behind_it_and_a_finished_run_has_none() -> None:
    assert [step.index for step in small_opening(committed=3).steps] == [3]
    assert small_opening(committed=4).finished
    assert drive(small_opening(committed=4), VirtualCluster(small_opening())).committed == 4


def test_an_answer_from_before_the_stop_is_late() -> None:
    before, actions = decide(small_opening(), Tick(0))
    old = next(action.lease for action in actions if isinstance(action, Generate))
    again, _ = decide(small_opening(jobs_issued=before.jobs_issued), Tick(0))
    assert decide(again, SliceDone(1, old)) == (again, ())


def test_more_commits_than_steps_are_refused() -> None:
    with pytest.raises(AssertionError, match="5 of 4 steps"):
        small_opening(committed=5)


def test_lanes_of_a_run_that_goes_on_are_there_from_its_start_and_not_idle_before() -> None:
    trace = Story(small_opening(committed=2), start_ns=1000).trace
    assert {lane.joined_ns for lane in trace.lanes} == {1000}
