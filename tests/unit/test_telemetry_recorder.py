"""The recorder turns events and actions into spans, for simulated runs and for live runs of weeks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.loop import drive
from digenrl.records import (
    Action,
    Calibrate,
    Calibrated,
    Evaluate,
    Evaluated,
    Event,
    Generate,
    Generated,
    GradientsSent,
    HeldOutChunk,
    JobFailed,
    LaneOffer,
    Publish,
    Published,
    Save,
    Saved,
    Score,
    Scored,
    SendGradients,
    Slice,
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
from digenrl.telemetry.utilization import lane_uses

PIECE = Slice(step=0, group=0, first=0, size=1)
GENERATE = Generate(0, 0, PIECE, lane=0, version=0)
GENERATED = Generated(4, GENERATE, version=0)
PUBLISH = Publish(1, 5, version=1, lanes=(0, 1))


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


class Recorded:
    """A recorder that is fed invented events and actions."""

    def __init__(self, **options: Any) -> None:
        self.state = opening()
        self.recorder = Recorder(self.state, **options)

    def feed(self, event: Event, *actions: Action) -> Recorded:
        self.recorder.observe(event, actions, self.state)
        return self

    def spans(self, work: Work) -> list[tuple[str, int, int]]:
        return [(s.lane, s.start_ns, s.end_ns) for s in self.recorder.trace().spans if s.work is work]


def test_with_a_sink_every_span_goes_there_and_nothing_is_kept() -> None:
    start, spans = opening(), list[Span]()
    keeping, passing = Recorder(start), Recorder(start, sink=spans.append)
    drive(start, VirtualCluster(start), (keeping, passing))
    assert spans == keeping.spans and spans
    assert (passing.spans, passing.commit_ends_ns, passing.help_decisions) == ([], [], [])
    assert passing.trace().lanes == keeping.trace().lanes
    assert passing.trace().end_ns == keeping.trace().end_ns


def size_of(value: object) -> int:
    """The number of objects in a container, nested ones included."""
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return 1 + sum(map(size_of, value))
    return 1


def test_with_a_sink_a_recorder_does_not_grow() -> None:
    start = opening(steps=60)
    recorder, sizes = Recorder(start, sink=lambda span: None), list[int]()

    class SizeAtCommits:
        def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
            if state.committed > len(sizes):
                sizes.append(size_of(vars(recorder)))

    drive(start, VirtualCluster(start), (recorder, SizeAtCommits()))
    assert len(sizes) == 60
    assert max(sizes[-10:]) <= max(sizes[:10])


def test_publications_without_results_are_forgotten_except_the_newest() -> None:
    recorded, jobs = Recorded(), [Publish(version, version, version, (0, 1)) for version in range(1, 20)]
    for job in jobs:
        recorded.feed(Tick(job.issued_ns), job)
    for at_ns, job in zip((30, 31, 32), reversed(jobs), strict=False):
        recorded.feed(Published(at_ns, job, (0, 1)))
    assert recorded.spans(Work.PUBLISH) == [("trainer", 18, 31), ("trainer", 19, 30)]


def test_a_version_that_arrives_lane_by_lane_is_one_publication_until_the_last_has_it() -> None:
    recorded = Recorded().feed(Tick(5), PUBLISH)
    recorded.feed(Published(7, PUBLISH, (1,)))
    assert recorded.spans(Work.PUBLISH) == []
    recorded.feed(Published(9, PUBLISH, (0,))).feed(Published(11, PUBLISH, (0,)))
    assert recorded.spans(Work.PUBLISH) == [("trainer", 5, 9)]


def test_a_lost_lane_does_not_delay_the_end_of_a_publication() -> None:
    recorded = Recorded().feed(Tick(5), PUBLISH).feed(Published(7, PUBLISH, (1,))).feed(WorkerLost(8, 0))
    assert recorded.spans(Work.PUBLISH) == [("trainer", 5, 7)]


def test_a_lane_that_joins_meanwhile_has_its_own_publication() -> None:
    to_new_lane = Publish(2, 6, version=1, lanes=(3,))
    recorded = Recorded().feed(Tick(5), PUBLISH)
    recorded.feed(WorkerJoined(6, LaneOffer("new", 1)), to_new_lane)
    recorded.feed(Published(8, PUBLISH, (0, 1))).feed(Published(10, to_new_lane, (3,)))
    assert recorded.spans(Work.PUBLISH) == [("trainer", 5, 8), ("trainer", 6, 10)]


def test_the_calibration_of_a_lane_that_joined_is_in_the_trace() -> None:
    job = Calibrate(2, 6, "generate", lane=3)
    recorded = Recorded().feed(WorkerJoined(6, LaneOffer("new", 0))).feed(Tick(6), job)
    recorded.feed(Calibrated(9, job, offer=LaneOffer("new", 1)))
    assert recorded.spans(Work.CALIBRATE) == [("new", 6, 9)]


def test_a_result_without_a_publication_is_ignored() -> None:
    assert Recorded().feed(Published(8, PUBLISH, (0, 1))).spans(Work.PUBLISH) == []


def test_a_late_result_of_a_lost_lane_ends_no_span() -> None:
    late = Generated(9, GENERATE, version=0)
    recorded = Recorded().feed(Tick(0), GENERATE).feed(WorkerLost(4, 0)).feed(late)
    assert recorded.spans(Work.GENERATE) == [("generator-0", 0, 4)]
    assert recorded.recorder.trace().lanes[0].left_ns == 4


def test_a_late_or_doubled_score_ends_no_span() -> None:
    first, second = Score(1, 1, PIECE, 0), Score(2, 3, Slice(0, 0, 1, 1), 0)
    recorded = Recorded().feed(GENERATED, first).feed(Scored(3, first), second).feed(Scored(4, first))
    recorded.feed(JobFailed(5, second, "no number")).feed(Scored(6, second))
    assert recorded.spans(Work.SCORE) == [("reward-0", 1, 3), ("reward-0", 3, 5)]


def test_no_span_ends_before_it_starts_even_if_a_timestamp_is_older_than_its_job() -> None:
    generate, train = Generate(0, 10, PIECE, lane=0, version=0), Train(1, 10, PIECE)
    recorded = Recorded().feed(Tick(10), generate, train)
    recorded.feed(Generated(9, generate, version=0)).feed(Trained(8, train))
    assert recorded.spans(Work.GENERATE) == [("generator-0", 10, 10)]
    assert recorded.spans(Work.TRAIN) == [("trainer", 10, 10)]
    assert recorded.recorder.trace().end_ns == 10


def test_losing_the_trainer_ends_its_span_and_those_of_its_lanes() -> None:
    train, generate = Train(1, 0, PIECE), Generate(2, 0, PIECE, lane=2, version=0)
    recorded = Recorded().feed(Tick(0), train, generate, GENERATE).feed(WorkerLost(3, 0, "trainer"))
    assert recorded.spans(Work.TRAIN) == [("trainer", 0, 3)]
    assert recorded.spans(Work.HELP) == [("helper-0", 0, 3)]
    assert recorded.spans(Work.GENERATE) == []


def test_training_on_a_lane_and_sending_its_gradients_are_spans_of_that_lane() -> None:
    train, own = Train(1, 0, PIECE, lane=1), Train(2, 0, Slice(0, 1, 0, 2), lane=2)
    send = SendGradients(3, 5, step=0, lane=1)
    recorded = Recorded().feed(Tick(0), train, own).feed(Trained(5, train), send).feed(Trained(6, own))
    recorded.feed(GradientsSent(7, send))
    assert recorded.spans(Work.TRAIN) == [("generator-1", 0, 5), ("helper-0", 0, 6)]
    assert recorded.spans(Work.SEND) == [("generator-1", 5, 7)]


def test_a_lost_lane_ends_its_training_and_no_other() -> None:
    train, own = Train(1, 0, PIECE, lane=1), Train(2, 0, Slice(0, 1, 0, 2), lane=2)
    recorded = Recorded().feed(Tick(0), train, own).feed(WorkerLost(3, 1))
    assert recorded.spans(Work.TRAIN) == [("generator-1", 0, 3)]
    assert recorded.feed(WorkerLost(4, 0, "trainer")).spans(Work.TRAIN)[1:] == [("helper-0", 0, 4)]


def evaluated() -> Recorded:
    """Of 10 ns a generator generates for 4, another evaluates for 4, and the trainer saves for 2."""
    evaluate, save = Evaluate(1, 2, HeldOutChunk(version=0, index=0), lane=1), Save(2, 8, 1)
    recorded = Recorded().feed(Tick(0), GENERATE).feed(Tick(2), evaluate).feed(GENERATED)
    return recorded.feed(Evaluated(6, evaluate)).feed(Tick(8), save).feed(Saved(10, save))


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
    without = Recorded().feed(Tick(0), GENERATE).feed(GENERATED).recorder.trace()
    assert not any(label in gantt_svg(without) for label in labels)
