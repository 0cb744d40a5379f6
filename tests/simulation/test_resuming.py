"""A run that stops after a commit and is resumed: on-policy, the two parts equal the whole run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import publish_to_all_at_once, spec_contents

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import Action, Generate, Generated, Job, Publish, Tick
from digenrl.scheduling import SchedulerState, decide, initial_state
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import Span, Work
from simulation.action_log import ActionLog

HELPS = ("none", "greedy", "search", "auto")


def resumed(initial: SchedulerState, committed: int, jobs_issued: int) -> SchedulerState:
    """The initial state of a run with the same settings that is resumed after this many commits."""
    offers = {helper: [lane.offer for lane in initial.lanes if lane.helper is helper] for helper in (False, True)}
    return initial_state(
        initial.terms,
        initial.costs,
        offers[False],
        offers[True],
        committed=committed,
        jobs_issued=jobs_issued,
    )


def without_id(action: Action) -> Action:
    """The action itself: ids shift where a publication is not needed."""
    return replace(action, id=0) if isinstance(action, Job) else action


class AuditedRun:
    """A finished, audited run: its spans, its help decisions and its actions except publications."""

    def __init__(self, initial: SchedulerState, start_ns: int = 0) -> None:
        recorder, log = Recorder(initial, start_ns=start_ns), ActionLog()
        cluster = VirtualCluster(initial, start_ns=start_ns)
        self.final = drive(initial, cluster, (recorder, log, Auditor(initial)))
        self.trace = recorder.trace()
        self.spans = [span for span in self.trace.spans if span.work is not Work.PUBLISH]
        actions = [(at, action) for at, action in log.actions if not isinstance(action, Publish)]
        self.actions = [(at, without_id(action)) for at, action in actions]
        self.decisions, self.commits_ns = recorder.help_decisions, recorder.commit_ends_ns


def stopped_and_resumed(initial: SchedulerState, after: int, pause_ns: int) -> tuple[AuditedRun, AuditedRun]:
    """The run up to a commit, and the rest of it from `pause_ns` after that commit."""
    first = AuditedRun(replace(initial, terms=replace(initial.terms, steps=after)))
    rest = resumed(initial, after, first.final.jobs_issued)
    return first, AuditedRun(rest, start_ns=first.commits_ns[-1] + pause_ns)


def by_start(*runs: AuditedRun) -> list[Span]:
    return sorted((span for run in runs for span in run.spans), key=lambda span: (span.start_ns, repr(span)))


def assert_the_parts_equal_the_whole(whole: AuditedRun, *parts: AuditedRun) -> None:
    assert by_start(*parts) == by_start(whole)
    assert [action for part in parts for action in part.actions] == whole.actions
    assert [decision for part in parts for decision in part.decisions] == whole.decisions
    assert [end for part in parts for end in part.commits_ns] == whole.commits_ns


@settings(max_examples=25)
@given(spec_contents(helps=HELPS, dispatches=("eager", "earliest_finish"), colocated=False), st.integers(1, 2))
def test_on_policy_with_instant_publishing_a_stop_changes_nothing(content: dict[str, Any], after: int) -> None:
    """At a commit every lane is idle, and if publishing takes no time, every lane has the version."""
    content["policy"]["stale_fraction"], content["steps"] = 0, 3
    publish_to_all_at_once(content, seconds=0)
    initial = initial_scheduler_state(parse_model(Spec, content), search_budget=20_000)
    assert_the_parts_equal_the_whole(AuditedRun(initial), *stopped_and_resumed(initial, after, pause_ns=0))


@settings(max_examples=25)
@given(spec_contents(helps=("none",), dispatches=("eager", "earliest_finish"), colocated=False))
def test_without_help_a_run_resumed_when_the_version_would_have_arrived_is_the_same(
    content: dict[str, Any],
) -> None:
    """A trainer that helps uses the time of publishing; without help it is idle then."""
    content["policy"]["stale_fraction"], content["steps"] = 0, 3
    publish_to_all_at_once(content, content["publish"])
    initial = initial_scheduler_state(parse_model(Spec, content), search_budget=100)
    parts = stopped_and_resumed(initial, after=1, pause_ns=initial.costs.publish_ns)
    assert_the_parts_equal_the_whole(AuditedRun(initial), *parts)


@settings(max_examples=25)
@given(spec_contents(helps=HELPS), st.integers(0, 2))
def test_every_resumed_run_keeps_its_promises(content: dict[str, Any], after: int) -> None:
    content["steps"] = 3
    initial = initial_scheduler_state(parse_model(Spec, content), search_budget=200)
    run = AuditedRun(resumed(initial, after, jobs_issued=1000), start_ns=50)
    assert run.final.finished
    assert [span.step for span in run.spans if span.work is Work.GENERATE and span.step < after] == []
    assert len(run.commits_ns) == 3 - after
    assert min(span.start_ns for span in run.spans) >= 50


def small_initial_state(committed: int = 0, jobs_issued: int = 0) -> SchedulerState:
    content = {
        "steps": 4,
        "prompts": 2,
        "samples_per_prompt": 2,
        "slice": 1,
        "generators": [{"count": 2, "seconds": {1: 1}}],
        "trainer": {"seconds_per_sample": 1},
    }
    return resumed(initial_scheduler_state(parse_model(Spec, content), search_budget=1), committed, jobs_issued)


def test_steps_and_versions_keep_their_numbers() -> None:
    initial = small_initial_state(committed=2, jobs_issued=7)
    _, actions = decide(initial, Tick(0))
    jobs = [action for action in actions if isinstance(action, Generate)]
    assert [(job.slice.step, job.version, job.id) for job in jobs] == [(2, 2, 7), (2, 2, 8)]


def test_no_step_is_open_beyond_the_last() -> None:
    assert [step.index for step in small_initial_state(committed=3).steps] == [3]
    assert small_initial_state(committed=4).finished
    assert drive(small_initial_state(committed=4), VirtualCluster(small_initial_state())).committed == 4


def test_a_result_from_before_the_stop_is_late() -> None:
    before, actions = decide(small_initial_state(), Tick(0))
    old = next(action for action in actions if isinstance(action, Generate))
    again, _ = decide(small_initial_state(jobs_issued=before.jobs_issued), Tick(0))
    assert decide(again, Generated(1, old, version=0)) == (again, ())


def test_a_run_that_resumes_from_its_last_checkpoint_has_nothing_left_to_save() -> None:
    state = small_initial_state()
    terms = replace(state.terms, save_every=1)
    assert resumed(replace(state, terms=terms), committed=4, jobs_issued=0).finished
    assert not resumed(replace(state, terms=terms), committed=3, jobs_issued=0).finished


def test_more_commits_than_steps_are_refused() -> None:
    with pytest.raises(AssertionError, match="5 of 4 steps"):
        small_initial_state(committed=5)


def test_lanes_of_a_resumed_run_are_present_from_its_start() -> None:
    trace = AuditedRun(small_initial_state(committed=2), start_ns=1000).trace
    assert {lane.joined_ns for lane in trace.lanes} == {1000}
