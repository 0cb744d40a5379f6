"""The Perfetto file: every span once, times that add up, and a file that is complete or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from handmade_traces import SECOND, both_trace, helped_trace, large_trace, on_policy_trace, span

from digenrl.config.reading import ConfigError
from digenrl.telemetry.perfetto import perfetto_json, write_perfetto
from digenrl.telemetry.trace import LaneInfo, Trace, Work

TRACES = pytest.mark.parametrize("trace", [on_policy_trace(), helped_trace(), both_trace(), large_trace()])


def events(trace: Trace, phase: str) -> list[dict[str, Any]]:
    return [event for event in perfetto_json(trace)["traceEvents"] if event["ph"] == phase]


def thread_names(trace: Trace) -> dict[tuple[int, int], str]:
    named = [event for event in events(trace, "M") if event["name"] == "thread_name"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}


@TRACES
def test_every_span_is_one_complete_event_on_its_lanes_thread(trace: Trace) -> None:
    names = thread_names(trace)
    shown = sorted(
        (names[one["pid"], one["tid"]].removesuffix(" (publish)"), one["cat"], one["ts"], one["dur"])
        for one in events(trace, "X")
    )
    spans = sorted(
        (one.lane, one.work.value, one.start_ns / 1000, (one.end_ns - one.start_ns) / 1000) for one in trace.spans
    )
    assert shown == spans


@TRACES
def test_events_are_sorted_by_time_after_the_names(trace: Trace) -> None:
    all_events = perfetto_json(trace)["traceEvents"]
    phases = [event["ph"] for event in all_events]
    names = phases.count("M")
    assert set(phases[:names]) == {"M"}
    times = [event["ts"] for event in all_events[names:]]
    assert times == sorted(times)


@TRACES
def test_work_on_one_thread_never_overlaps(trace: Trace) -> None:
    ends: dict[tuple[int, int], float] = {}
    for event in events(trace, "X"):
        thread = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(thread, 0.0) - 1e-6
        ends[thread] = event["ts"] + event["dur"]


def test_durations_add_up_to_the_busy_time() -> None:
    by_kind: dict[str, float] = {}
    for event in events(on_policy_trace(), "X"):
        by_kind[event["cat"]] = by_kind.get(event["cat"], 0.0) + event["dur"] / 1e6
    assert by_kind == {"generate": 20, "score": 4, "train": 8, "commit": 1, "publish": 1}


def test_pools_are_processes_and_lanes_are_threads_in_the_traces_order() -> None:
    trace = helped_trace()
    metadata = events(trace, "M")
    processes = {one["pid"]: one["args"]["name"] for one in metadata if one["name"] == "process_name"}
    assert processes == {0: "run", 1: "generator", 2: "trainer"}
    assert thread_names(trace) == {(1, 1): "gen", (2, 2): "trainer", (2, 3): "helper-0"}
    order = {one["tid"]: one["args"]["sort_index"] for one in metadata if one["name"] == "thread_sort_index"}
    assert order == {1: 1, 2: 2, 3: 3}


def test_an_event_carries_the_ids_of_its_samples() -> None:
    spans = (span("gen", Work.GENERATE, 1, 2.5, step=4, group=2, first=6, size=2, version=3),)
    [event] = events(Trace((LaneInfo("gen", "generator"),), spans, 3 * SECOND), "X")
    assert event["args"] == {"step": 4, "group": 2, "samples": [6, 7], "version": 3, "stale": True}
    assert (event["ts"], event["dur"], event["name"]) == (1e6, 1.5e6, "generate stale g2")


def test_commits_and_publications_are_named_by_the_version_they_make() -> None:
    names = [one["name"] for one in events(on_policy_trace(), "X") if one["cat"] in ("commit", "publish")]
    assert names == ["commit v1", "publish v1", "commit v2"]


def test_each_slice_points_at_the_training_of_its_samples() -> None:
    trace = helped_trace()
    starts, ends = events(trace, "s"), events(trace, "f")
    assert sorted(one["id"] for one in starts) == sorted(one["id"] for one in ends) == [1, 2, 3, 4]
    trained_at = {one["id"]: one["ts"] / 1e6 for one in ends}
    # Slices in order of their start: group 0 on the generator, group 0 on the helper, then group 1 twice.
    assert [trained_at[number] for number in (1, 2, 3, 4)] == [6, 6, 12, 12]


def test_each_slice_points_at_the_lane_that_trains_its_samples() -> None:
    trace = both_trace()
    names = thread_names(trace)
    targets = [
        (names[one["pid"], one["tid"]], one["ts"] / 1e6)
        for one in sorted(events(trace, "f"), key=lambda e: e["id"])
    ]
    # Of each step: sample 0 and 1 of group 0, then those of group 1.
    assert targets[:4] == [("helper-0", 4), ("gen", 4), ("helper-0", 5), ("helper-0", 5)]
    assert "send step 1" in {one["name"] for one in events(trace, "X")}


def test_training_a_whole_step_at_once_is_pointed_at_by_all_its_slices() -> None:
    spans = (
        span("gen", Work.GENERATE, 0, 1, group=0, size=1),
        span("gen", Work.GENERATE, 1, 2, group=1, size=1),
        span("trainer", Work.TRAIN, 2, 4, size=2),
    )
    lanes = (LaneInfo("gen", "generator"), LaneInfo("trainer", "trainer"))
    assert [one["ts"] for one in events(Trace(lanes, spans, 4 * SECOND), "f")] == [2e6, 2e6]


def test_counters_show_samples_trained_and_the_stale_share() -> None:
    trace = large_trace()
    counters: dict[str, list[float]] = {}
    for event in events(trace, "C"):
        counters.setdefault(event["name"], []).append(event["args"]["value"])
    trained = counters["samples trained"]
    assert trained == sorted(trained)
    assert trained[-1] == sum(one.size for one in trace.spans if one.work is Work.TRAIN)
    made = [one for one in trace.spans if one.work in (Work.GENERATE, Work.HELP)]
    stale_share = sum(one.size for one in made if one.stale) / sum(one.size for one in made)
    assert counters["stale share of started samples"][-1] == pytest.approx(stale_share)


def test_the_written_file_is_the_same_trace_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("an older trace")
    write_perfetto(on_policy_trace(), path)
    assert json.loads(path.read_text()) == perfetto_json(on_policy_trace())
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_no_partial_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("an older trace")

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(ConfigError, match="no space left"):
        write_perfetto(on_policy_trace(), path)
    assert path.read_text() == "an older trace"
    assert list(tmp_path.iterdir()) == [path]
