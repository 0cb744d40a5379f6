"""A trace as Chrome trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

A pool is a process, a lane is a thread. Times are microseconds. Publishing gets its own thread, because the format
draws overlapping work on one thread as if it were nested.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from digenrl.telemetry.row_folding import pools_of
from digenrl.telemetry.trace import Span, Trace, Work
from digenrl.telemetry.writing import write_atomically

Event: TypeAlias = dict[str, Any]

_PUBLISH_THREAD_SUFFIX = " (publish)"


def perfetto_json(trace: Trace) -> dict[str, Any]:
    """The file as plain dictionaries: names first, then all events ordered by time.

    Every span is one complete ("X") event. Arrows lead from each slice to the training of its samples; counters
    show the samples trained so far, and the stale share of the samples started so far.
    """
    threads = _threads(trace)
    timed = [
        *(_complete_event(span, *threads[_thread_name(span)]) for span in trace.spans),
        *_arrows(trace.spans, threads),
        *_trained_counter(trace.spans),
        *_stale_counter(trace.spans),
    ]
    timed.sort(key=lambda event: float(event["ts"]))
    return {"traceEvents": [*_names(trace, threads), *timed], "displayTimeUnit": "ms"}


def write_perfetto(trace: Trace, path: Path) -> None:
    """Writes the trace to a file, completely or not at all."""
    write_atomically(path, json.dumps(perfetto_json(trace)))


def _thread_name(span: Span) -> str:
    return span.lane + (_PUBLISH_THREAD_SUFFIX if span.work is Work.PUBLISH else "")


def _threads(trace: Trace) -> dict[str, tuple[int, int]]:
    """(process, thread) of every lane and of every lane's publishing; process 0 holds the counters."""
    publishing = {span.lane for span in trace.spans if span.work is Work.PUBLISH}
    threads: dict[str, tuple[int, int]] = {}
    for process, lanes in enumerate(pools_of(trace.lanes).values(), start=1):
        for lane in lanes:
            threads[lane.name] = (process, len(threads) + 1)
            if lane.name in publishing:
                threads[lane.name + _PUBLISH_THREAD_SUFFIX] = (process, len(threads) + 1)
    return threads


def _names(trace: Trace, threads: dict[str, tuple[int, int]]) -> Iterable[Event]:
    for process, pool in enumerate(["run", *pools_of(trace.lanes)]):
        yield _metadata("process_name", process, 0, {"name": pool})
        yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for name, (process, thread) in threads.items():
        yield _metadata("thread_name", process, thread, {"name": name})
        yield _metadata("thread_sort_index", process, thread, {"sort_index": thread})


def _metadata(kind: str, process: int, thread: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _complete_event(span: Span, process: int, thread: int) -> Event:
    args: dict[str, Any] = {"step": span.step, "version": span.version, "stale": span.stale}
    if span.group >= 0:
        args["group"] = span.group
    if span.size:
        args["samples"] = list(range(span.first, span.first + span.size))
    return {
        "ph": "X",
        "name": _event_name(span),
        "cat": span.work.value,
        "pid": process,
        "tid": thread,
        "ts": _microseconds(span.start_ns),
        "dur": _microseconds(span.end_ns - span.start_ns),
        "args": args,
    }


def _event_name(span: Span) -> str:
    """The kind of work, then a number: the viewer gives the same color to names that differ only in digits."""
    kind = f"{span.work} stale" if span.stale else span.work.value
    if span.work in (Work.COMMIT, Work.PUBLISH):
        return f"{kind} v{span.step + 1}"
    return f"{kind} g{span.group}" if span.group >= 0 else f"{kind} step {span.step}"


def _arrows(spans: tuple[Span, ...], threads: dict[str, tuple[int, int]]) -> Iterable[Event]:
    """From the end of each slice to the start of the training that first uses it."""
    trainings: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        if span.work is Work.TRAIN:
            trainings.setdefault((span.step, span.group), []).append(span)
    slices = [span for span in spans if span.work in (Work.GENERATE, Work.HELP)]
    for number, slice_span in enumerate(slices, start=1):
        # Training of a whole step belongs to no group.
        of_group = trainings.get((slice_span.step, slice_span.group)) or trainings.get((slice_span.step, -1), [])
        users = [train for train in of_group if _uses(train, slice_span)]
        if users:
            arrow = {"name": "slice to training", "cat": "arrow", "id": number}
            user = min(users, key=lambda train: train.start_ns)
            # The format attaches an arrow to the work at its time: the last nanosecond is still inside.
            start_ns = max(slice_span.start_ns, slice_span.end_ns - 1)
            yield {**arrow, "ph": "s", **_place(slice_span, threads), "ts": _microseconds(start_ns)}
            yield {**arrow, "ph": "f", "bp": "e", **_place(user, threads), "ts": _microseconds(user.start_ns)}


def _uses(train: Span, slice_span: Span) -> bool:
    whole_step = train.group < 0
    return whole_step or (
        train.first < slice_span.first + slice_span.size and slice_span.first < train.first + train.size
    )


def _place(span: Span, threads: dict[str, tuple[int, int]]) -> dict[str, int]:
    process, thread = threads[_thread_name(span)]
    return {"pid": process, "tid": thread}


def _trained_counter(spans: tuple[Span, ...]) -> Iterable[Event]:
    trained = 0
    for span in sorted((s for s in spans if s.work is Work.TRAIN), key=lambda s: s.end_ns):
        trained += span.size
        yield _counter("samples trained", span.end_ns, trained)


def _stale_counter(spans: tuple[Span, ...]) -> Iterable[Event]:
    started = stale = 0
    slices = [s for s in spans if s.work in (Work.GENERATE, Work.HELP) and s.size]
    for span in sorted(slices, key=lambda s: s.start_ns):
        started += span.size
        stale += span.size if span.stale else 0
        yield _counter("stale share of started samples", span.start_ns, stale / started)


def _counter(name: str, time_ns: int, value: float) -> Event:
    return {
        "ph": "C",
        "name": name,
        "pid": 0,
        "tid": 0,
        "ts": _microseconds(time_ns),
        "args": {"value": value},
    }


def _microseconds(time_ns: int) -> float:
    return time_ns / 1000
