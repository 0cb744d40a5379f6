"""The recorder turns events and actions into spans, for simulated runs and for live runs of weeks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import (
    Action,
    Event,
    Generate,
    LaneOffer,
    Lease,
    Publish,
    Published,
    SamplesScored,
    Score,
    ScoreFailed,
    Slice,
    SliceDone,
    Tick,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling import SchedulerState
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster
from digenrl.telemetry.gantt_svg import gantt_svg
from digenrl.telemetry.gantt_terminal import gantt_text
from digenrl.telemetry.perfetto import perfetto_json
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import Span, Work
from digenrl.telemetry.utilisation import lane_uses

PIECE = Slice(step=0, group=0, first=0, size=1)
LEASE = Lease(PIECE, lane=0, epoch=0, version=0, started_ns=0)


def opening(steps: int = 2, **policy: Any) -> SchedulerState:
    content = {
        "steps": steps,
        "prompts": 2,
        "samples_per_prompt": 2,
        "slice": 1,
        "generators": [{"count": 2, "seconds": {1: 1}}],
        "reward": {"lanes": 1, "seconds": 0.1},
        "trainer": {"seconds_per_sample": 0.2, "commit": 0.1, "helper": {"seconds": {1: 1}}},
        "publish": 0.3,
        "policy": {"help": "greedy", **policy},
    }
    return initial_scheduler_state(parse_model(Spec, content), search_budget=100)


class Told:
    """A recorder that is told a made-up course of events and actions."""

    def __init__(self, **options: Any) -> None:
        self.state = opening()
        self.recorder = Recorder(self.state, **options)

    def tell(self, event: Event, *actions: Action) -> Told:
        self.recorder.observe(event, actions, self.state)
        return self

    def spans(self, work: Work) -> list[tuple[str, int, int]]:
        return [(s.lane, s.start_ns, s.end_ns) for s in self.recorder.trace().spans if s.work is work]


def test_with_a_sink_every_span_and_decision_goes_there_and_nothing_is_kept() -> None:
    start, spans, decisions = opening(), list[Span](), list[tuple[int, str]]()
    keeping = Recorder(start)
    passing = Recorder(
        start, sink=spans.append, on_help_decision=lambda at, choice: decisions.append((at, choice))
    )
    drive(start, VirtualCluster(start), (keeping, passing))
    assert spans == keeping.spans and spans
    assert decisions == keeping.help_decisions and decisions
    assert (passing.spans, passing.commit_ends_ns, passing.help_decisions) == ([], [], [])
    assert passing.trace().lanes == keeping.trace().lanes
    assert passing.trace().end_ns == keeping.trace().end_ns


def size_of(value: object) -> int:
    """How many things a recorder holds, however deep."""
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return 1 + sum(map(size_of, value))
    return 1


def test_with_a_sink_a_recorder_stays_as_small_as_it_was() -> None:
    start = opening(steps=60)
    recorder, sizes = Recorder(start, sink=lambda span: None), list[int]()

    class SizeAtCommits:
        def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
            if state.committed > len(sizes):
                sizes.append(size_of(vars(recorder)))

    drive(start, VirtualCluster(start), (recorder, SizeAtCommits()))
    assert len(sizes) == 60
    assert max(sizes[-10:]) <= max(sizes[:10])


def test_lanes_that_never_answer_leave_nothing_behind_but_the_newest_publications() -> None:
    told = Told()
    for version in range(1, 20):
        told.tell(Tick(version), Publish(version, (0, 1)))
    told.tell(Published(30, 19, (0, 1))).tell(Published(31, 18, (0, 1))).tell(Published(32, 17, (0, 1)))
    assert told.spans(Work.PUBLISH) == [("trainer", 18, 31), ("trainer", 19, 30)]


def test_a_version_that_arrives_lane_by_lane_is_one_publication_until_the_last_has_it() -> None:
    told = Told().tell(Tick(5), Publish(1, (0, 1)))
    told.tell(Published(7, 1, (1,)))
    assert told.spans(Work.PUBLISH) == []
    told.tell(Published(9, 1, (0,))).tell(Published(11, 1, (0,)))
    assert told.spans(Work.PUBLISH) == [("trainer", 5, 9)]


def test_a_lane_that_is_lost_holds_up_no_publication() -> None:
    told = Told().tell(Tick(5), Publish(1, (0, 1))).tell(Published(7, 1, (1,))).tell(WorkerLost(8, 0))
    assert told.spans(Work.PUBLISH) == [("trainer", 5, 7)]


def test_a_lane_that_joins_meanwhile_has_a_publication_of_its_own() -> None:
    told = Told().tell(Tick(5), Publish(1, (0, 1)))
    told.tell(WorkerJoined(6, LaneOffer("new", 1)), Publish(1, (3,)))
    told.tell(Published(8, 1, (0, 1))).tell(Published(10, 1, (3,)))
    assert told.spans(Work.PUBLISH) == [("trainer", 5, 8), ("trainer", 6, 10)]


def test_a_version_nobody_asked_for_is_no_publication() -> None:
    assert Told().tell(Published(8, 1, (0, 1))).spans(Work.PUBLISH) == []


def test_a_late_answer_of_a_lost_lane_ends_nothing() -> None:
    told = Told().tell(Tick(0), Generate(LEASE)).tell(WorkerLost(4, 0)).tell(SliceDone(9, LEASE))
    assert told.spans(Work.GENERATE) == [("generator-0", 0, 4)]
    assert told.recorder.trace().lanes[0].left_ns == 4


def test_a_late_or_doubled_score_ends_nothing() -> None:
    other = Slice(0, 0, 1, 1)
    told = Told().tell(SliceDone(1, LEASE), Score(PIECE, 0)).tell(SamplesScored(3, PIECE, 0), Score(other, 0))
    told.tell(SamplesScored(4, PIECE, 0)).tell(ScoreFailed(5, other, 0, "no number")).tell(
        SamplesScored(6, other, 0)
    )
    assert told.spans(Work.SCORE) == [("reward-0", 1, 3), ("reward-0", 3, 5)]


def test_instant_scores_have_no_lane_and_no_span() -> None:
    told = Told().tell(SliceDone(1, LEASE), Score(PIECE, -1)).tell(SamplesScored(3, PIECE, -1))
    assert told.spans(Work.SCORE) == []


def test_no_span_ends_before_it_starts_even_if_a_stamp_is_older_than_its_order() -> None:
    told = Told().tell(Tick(10), Generate(Lease(PIECE, 0, 0, 0, 10)), Train((PIECE,)))
    told.tell(SliceDone(9, Lease(PIECE, 0, 0, 0, 10))).tell(Trained(8, (PIECE,)))
    assert told.spans(Work.GENERATE) == [("generator-0", 10, 10)]
    assert told.spans(Work.TRAIN) == [("trainer", 10, 10)]
    assert told.recorder.trace().end_ns == 10


def evaluated() -> Told:
    """The trainer saves for 2 ns of 10, and a generator evaluates for 4."""
    told = Told().tell(Tick(0), Generate(LEASE)).tell(SliceDone(4, LEASE))
    told.recorder.add_span(Span("generator-1", Work.EVALUATE, 2, 6, step=0))
    told.recorder.add_span(Span("trainer", Work.SAVE, 8, 10, step=0))
    return told


def test_evaluations_and_checkpoints_are_busy_time() -> None:
    trace = evaluated().recorder.trace()
    assert trace.end_ns == 10
    busy = {name: use.busy_share for name, use in lane_uses(trace).items()}
    assert [busy[name] for name in ("generator-0", "generator-1", "reward-0", "trainer")] == [0.4, 0.4, 0.0, 0.2]


def test_evaluations_and_checkpoints_are_drawn_and_explained_where_they_occur() -> None:
    trace = evaluated().recorder.trace()
    labels = ("evaluate", "save (write a checkpoint)")
    for chart in (gantt_svg(trace), gantt_text(trace, 100).plain):
        assert all(label in chart for label in labels)
    assert {event["name"] for event in perfetto_json(trace)["traceEvents"]} >= {"evaluate step 0", "save step 0"}
    without = Told().tell(Tick(0), Generate(LEASE)).tell(SliceDone(4, LEASE)).recorder.trace()
    assert not any(label in gantt_svg(without) for label in labels)


def test_a_span_on_an_unknown_lane_is_refused() -> None:
    with pytest.raises(AssertionError, match="unknown lane 'ghost'"):
        Told().recorder.add_span(Span("ghost", Work.SAVE, 0, 1, step=0))


def test_added_spans_go_to_the_sink_too() -> None:
    spans: list[Span] = []
    saved = Span("trainer", Work.SAVE, 0, 1, step=0)
    Told(sink=spans.append).recorder.add_span(saved)
    assert spans == [saved]
