"""The metrics of a step, computed live, against the full trace and an account of every sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_specs import spec_contents
from rich.console import Console
from simulation.random_faults import faults_for
from watched_runs import BOTH, SPEC, AfterEach, KeptNumbers, initial_state_of, watch

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.console.live_view import Clocks, RunTitle, TerminalView
from digenrl.loop import drive
from digenrl.metrics.busy import BusyMeter
from digenrl.metrics.step_metrics import StepMetrics
from digenrl.records import (
    NO_LANE,
    Calibrate,
    Committed,
    Generate,
    Generated,
    LaneOffer,
    Quarantine,
    SampleId,
    Train,
    Trained,
    WorkerLost,
)
from digenrl.run_folder.metric_lines import EvaluationRecord
from digenrl.scheduling import SchedulerState, initial_state
from digenrl.simulation.virtual_cluster import Faults, VirtualCluster
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import LaneInfo, Span, Trace, Work
from digenrl.telemetry.utilization import lane_uses

SECOND = 1_000_000_000
NO_FAULTS = Faults()
STOPPED_CLOCKS = Clocks(now=lambda: 0.0, processor=lambda: 0.0)


def _clip(start_ns: int, end_ns: int, window: tuple[int, int]) -> tuple[int, int]:
    return max(start_ns, window[0]) - window[0], min(end_ns, window[1]) - window[0]


def _shares_within(trace: Trace, window: tuple[int, int]) -> dict[str, float]:
    """Busy shares of a window of a finished run, computed on a trace cut to that window."""
    lanes = []
    for lane in trace.lanes:
        left_ns = trace.end_ns if lane.left_ns is None else lane.left_ns
        joined_ns, left_ns = _clip(lane.joined_ns, left_ns, window)
        if joined_ns < left_ns:
            lanes.append(LaneInfo(lane.name, lane.pool, joined_ns, left_ns))
    known = {lane.name for lane in lanes}
    spans = []
    for each in trace.spans:
        start_ns, end_ns = _clip(each.start_ns, each.end_ns, window)
        if start_ns < end_ns and each.lane in known:
            spans.append(Span(each.lane, each.work, start_ns, end_ns, each.step, version=each.version))
    cut = Trace(tuple(lanes), tuple(spans), window[1] - window[0], trace.shared_cards)
    return {name: use.busy_share for name, use in lane_uses(cut).items()}


class Account:
    """Which lane generated and which trained every sample: an independent account."""

    def __init__(self, initial: SchedulerState) -> None:
        self._before = initial
        self._jobs: dict[SampleId, Generate] = {}
        self._trained: dict[SampleId, int] = {}
        self._retired: set[tuple[int, int]] = set()

    def observe(self, event: Any, actions: Any, state: SchedulerState) -> None:
        if isinstance(event, Generated) and self._before.lanes[event.job.lane].job == event.job:
            self._jobs |= dict.fromkeys(event.job.slice.samples(), event.job)
        if isinstance(event, Trained) and self._is_news(event.job):
            self._trained |= dict.fromkeys(event.job.slice.samples(), event.job.lane)
        self._retired |= {(each.step, each.group) for each in actions if isinstance(each, Quarantine)}
        self._before = state

    def _is_news(self, job: Train) -> bool:
        return job.lane == NO_LANE or self._before.lanes[job.lane].job == job

    def shares(self, step: int) -> tuple[float, float, float]:
        """The stale, the helped and the assisted share of a step."""
        terms, lanes = self._before.terms, self._before.lanes
        kept = [s for s in self._trained if s.step == step and (s.step, s.group) not in self._retired]
        jobs = [self._jobs[sample] for sample in kept]
        helped = 0 if terms.colocated else sum(lanes[job.lane].helper for job in jobs)
        trainers = [self._trained[sample] for sample in kept]
        assisted = sum(lane != NO_LANE and not lanes[lane].helper for lane in trainers)
        return sum(job.stale for job in jobs) / len(kept), helped / len(kept), assisted / len(kept)


def _check_against_the_full_trace(initial: SchedulerState, faults: Faults) -> list[dict[str, float]]:
    kept, account, recorder, states = (
        KeptNumbers(),
        Account(initial),
        Recorder(initial),
        deque([initial], maxlen=1),
    )
    last = AfterEach(lambda _event, _actions, state: states.append(state))
    watch(initial, [kept], faults=faults, after=(account, recorder, last))
    trace, began_ns = recorder.trace(), 0
    unfinished = [  # calibrations that the end of the run has cut off
        Span(lane.name, Work.CALIBRATE, lane.job.issued_ns, trace.end_ns, 0)
        for lane in states[0].lanes
        if isinstance(lane.job, Calibrate)
    ]
    trace = replace(trace, spans=(*trace.spans, *unfinished))
    assert [numbers["step"] for numbers in kept.steps] == list(range(initial.terms.steps))
    for numbers, ended_ns in zip(kept.steps, recorder.commit_ends_ns, strict=True):
        assert numbers["at_s"] == ended_ns / SECOND
        assert numbers["step_s"] == (ended_ns - began_ns) / SECOND
        assert ("assisted_share" in numbers) == initial.terms.shares_work
        shares = (numbers["stale_share"], numbers["helped_share"], numbers.get("assisted_share", 0.0))
        assert shares == account.shares(int(numbers["step"]))
        busy = {name.removeprefix("busy/"): share for name, share in numbers.items() if name.startswith("busy/")}
        assert busy == pytest.approx(_shares_within(trace, (began_ns, ended_ns)), abs=1e-12)
        began_ns = ended_ns
    return kept.steps


def test_a_step_has_the_shares_of_the_full_trace() -> None:
    steps = _check_against_the_full_trace(initial_state_of(), NO_FAULTS)
    assert any(numbers["stale_share"] > 0 for numbers in steps)
    assert any(numbers["helped_share"] > 0 for numbers in steps)
    assert any(0 < numbers["busy/l40s-0"] < 1 for numbers in steps)
    assert steps[1]["samples"] == 16
    assert steps[1]["samples_per_s"] == pytest.approx(16 / steps[1]["step_s"])
    assert [numbers["version"] for numbers in steps] == [1, 2, 3, 4]


def test_many_lanes_have_one_busy_share_per_pool() -> None:
    kept = {count: KeptNumbers() for count in (20, 40)}
    for count, sink in kept.items():
        generators = [{"name": "a100", "count": count, "seconds": {1: 1.0, 2: 1.7}}]
        watch(initial_state_of(generators=generators), [sink])
    for few, many in zip(kept[20].steps, kept[40].steps, strict=True):
        of_many = {name: share for name, share in many.items() if name.startswith("busy/")}
        assert of_many.keys() == {"busy/generator", "busy/reward", "busy/trainer"}
        assert all(0 < share <= 1 for share in of_many.values())
        assert few.keys() >= {"busy/a100-19", "busy/reward-1", "busy/trainer", "busy/helper-1"}


@settings(max_examples=60)
@given(st.data())
def test_any_run_has_the_shares_of_its_full_trace_however_lanes_join_and_leave(data: st.DataObject) -> None:
    spec = parse_model(Spec, data.draw(spec_contents(helps=("none", "greedy", "auto"))))
    initial = initial_state_of(spec)
    _check_against_the_full_trace(initial, data.draw(faults_for(initial)))


def test_a_step_of_lanes_that_do_both_has_the_shares_of_the_full_trace() -> None:
    steps = _check_against_the_full_trace(initial_state_of(**BOTH), NO_FAULTS)
    assert any(numbers["helped_share"] > 0 for numbers in steps)
    assert all(0 < numbers["assisted_share"] < 1 for numbers in steps)
    assert all(numbers["busy/trainer"] >= numbers["busy/helper-1"] > 0.5 for numbers in steps)


def test_samples_count_where_they_are_trained_again_after_a_lane_was_lost_with_their_gradients() -> None:
    initial, trained = initial_state_of(**BOTH), list[Trained]()

    def note(event: Any, actions: Any, state: SchedulerState) -> None:
        if isinstance(event, Trained):
            trained.append(event)

    watch(initial, [], after=(AfterEach(note),))
    first = next(event for event in trained if not initial.lanes[event.job.lane].helper)
    lost = WorkerLost(first.at_ns + 1, first.job.lane)
    _check_against_the_full_trace(initial, Faults(events=(lost,)))
    trained.clear()
    watch(initial, [], faults=Faults(events=(lost,)), after=(AfterEach(note),))
    assert [event.job.slice for event in trained].count(first.job.slice) == 2


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 25 * SECOND), st.integers(0, 2)), max_size=3))
def test_any_run_of_lanes_that_do_both_has_the_shares_of_its_full_trace(losses: list[tuple[int, int]]) -> None:
    faults = Faults(events=tuple(WorkerLost(at_ns, lane) for at_ns, lane in losses))
    _check_against_the_full_trace(initial_state_of(**BOTH), faults)


def test_the_shares_of_all_steps_add_up_to_the_share_of_the_run() -> None:
    initial, kept = initial_state_of(), KeptNumbers()
    recorder = Recorder(initial)
    watch(initial, [kept], after=(recorder,))
    whole = lane_uses(recorder.trace())
    assert len(whole) == 8
    for lane, use in whole.items():
        busy_s = sum(numbers[f"busy/{lane}"] * numbers["step_s"] for numbers in kept.steps)
        assert busy_s / kept.steps[-1]["at_s"] == pytest.approx(use.busy_share)


def test_an_evaluation_keeps_a_lane_busy_and_a_publication_does_not() -> None:
    meter = BusyMeter(initial_state_of())
    meter.add(Span("a100-0", Work.EVALUATE, 6 * SECOND, 8 * SECOND, step=0))
    meter.add(Span("a100-0", Work.EVALUATE, 0, 2 * SECOND, step=0))  # reported late
    meter.add(Span("trainer", Work.PUBLISH, 0, 9 * SECOND, step=0))
    meter.add(Span("helper-0", Work.HELP, 5 * SECOND, 7 * SECOND, step=0))
    meter.add(Span("helper-1", Work.HELP, 5 * SECOND, 6 * SECOND, step=0))
    meter.add(Span("trainer", Work.TRAIN, 0, SECOND, step=0))
    working = Span("a100-1", Work.GENERATE, 9 * SECOND, 10 * SECOND, step=0)
    shares = meter.next_window(10 * SECOND, [working])
    assert shares["a100-0"] == 0.4
    assert shares["a100-1"] == 0.1
    assert shares["trainer"] == pytest.approx(0.3)
    assert shares["helper-1"] == pytest.approx(0.2)
    meter.add(Span("a100-1", Work.GENERATE, 9 * SECOND, 12 * SECOND, step=0))
    assert meter.next_window(14 * SECOND, ())["a100-1"] == 0.5


def _run_with_reports(reports: dict[int, list[tuple[int, dict[str, float | None]]]]) -> list[dict[str, float]]:
    """A run in which these metrics are reported just before the commit of a step is observed."""
    initial, kept = initial_state_of(), KeptNumbers()
    metrics = StepMetrics(initial, [kept])

    def report(event: Any, actions: Any, state: SchedulerState) -> None:
        for step, numbers in reports.get(event.job.step, ()) if isinstance(event, Committed) else ():
            metrics.report(step, numbers)

    recorder = Recorder(initial, sink=metrics.add_span)
    drive(initial, VirtualCluster(initial), (AfterEach(report), recorder, metrics))
    return kept.steps


def test_reported_metrics_are_written_with_their_step_and_late_ones_with_the_next() -> None:
    steps = _run_with_reports(
        {
            0: [(0, {"reward_mean": 0.5, "kl": None}), (1, {"reward/ocr": 0.75})],
            1: [(1, {"reward_mean": 0.25}), (1, {"reward_mean": 0.625}), (0, {"publish_s": 0.125})],
        }
    )
    assert steps[0]["reward_mean"] == 0.5
    assert "kl" not in steps[0] and "reward/ocr" not in steps[0]
    assert (steps[1]["reward_mean"], steps[1]["reward/ocr"], steps[1]["publish_s"]) == (0.625, 0.75, 0.125)
    assert "reward_mean" not in steps[2]


def test_computed_metrics_cannot_be_reported() -> None:
    metrics = StepMetrics(initial_state_of(), ())
    for name in ("step_s", "assisted_share", "busy/trainer"):
        with pytest.raises(AssertionError, match=name):
            metrics.report(0, {name: 1.0})


def test_a_resumed_run_continues_from_its_step() -> None:
    initial = initial_state_of()
    kept, whole = KeptNumbers(), KeptNumbers()
    watch(initial, [whole])
    offers = [LaneOffer(lane.name, lane.slice_ns) for lane in initial.lanes]
    generators, helpers = offers[:3], offers[3:]
    resumed = initial_state(initial.terms, initial.costs, generators, helpers, committed=2)
    metrics = StepMetrics(resumed, [kept], start_ns=100 * SECOND)
    recorder = Recorder(resumed, start_ns=100 * SECOND, sink=metrics.add_span)
    drive(resumed, VirtualCluster(resumed, start_ns=100 * SECOND), (recorder, metrics))
    assert [numbers["step"] for numbers in kept.steps] == [2, 3]
    # It starts like a first step: no work is in progress yet.
    assert kept.steps[0]["step_s"] == whole.steps[0]["step_s"]
    assert kept.steps[0]["busy/a100-0"] == whole.steps[0]["busy/a100-0"]


def test_evaluations_reach_every_sink() -> None:
    sinks = [KeptNumbers(), KeptNumbers()]
    metrics = StepMetrics(initial_state_of(), sinks)
    evaluation = EvaluationRecord(0, 1.5, 200, {"reward_mean": 0.5})
    metrics.evaluated(evaluation)
    assert [sink.evaluations for sink in sinks] == [[evaluation]] * 2


def _entries(thing: object) -> int:
    """The number of entries of all containers inside it."""
    seen: set[int] = set()

    def count(each: object) -> int:
        if id(each) in seen or isinstance(each, SchedulerState | str | bytes | int | float):
            return 0
        seen.add(id(each))
        inside: Iterable[object] = ()
        if isinstance(each, dict):
            inside = (*each.keys(), *each.values())
        elif isinstance(each, list | tuple | set | deque):
            inside = tuple(each)
        elif type(each).__module__.startswith("digenrl."):
            names = (*getattr(type(each), "__slots__", ()), *getattr(each, "__dict__", ()))
            inside = [getattr(each, name) for name in names]
        return len(list(inside)) + sum(count(part) for part in inside)

    return count(thing)


def test_nothing_grows_over_six_hundred_steps() -> None:
    small = {"prompts": 1, "samples_per_prompt": 4, "slice": 1, "generators": SPEC["generators"][1:]}
    initial = initial_state_of(**small, steps=600, policy={"help": "greedy", "stale_fraction": 0.5})
    faults = Faults(failing_jobs=frozenset(range(0, 10_000, 7)))
    view = TerminalView(RunTitle("long", Path("runs/long-1"), 600), Console(file=StringIO()), STOPPED_CLOCKS)
    metrics = StepMetrics(initial, [view])
    recorder = Recorder(initial, sink=metrics.add_span)
    largest = [0, 0]

    def look(event: Any, actions: Any, state: SchedulerState) -> None:
        if isinstance(event, Committed):
            step = event.job.step
            metrics.report(step + 1, {"kl": 0.5, "reward_mean": event.at_ns})
            metrics.report(step, {"publish_s": 0.5})
            metrics.evaluated(EvaluationRecord(step, 0.0, 1, {"reward_mean": float(step)}))
            half = step // 300
            largest[half] = max(largest[half], _entries(metrics))  # the view is one of its sinks

    drive(initial, VirtualCluster(initial, faults), (recorder, metrics, view, AfterEach(look)))
    assert 100 < largest[1] <= largest[0] < 1000
