"""The lines of spans.jsonl, one per span of the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from digenrl.config.limits import LONGEST_RUN_NS, MOST_STEPS, SAMPLES_PER_STEP
from digenrl.config.reading import shown
from digenrl.run_folder.lines import JsonLine, JsonLines, located_lines
from digenrl.telemetry.trace import LaneInfo, Span, Trace, Work

_SPAN = TypeAdapter(Span)
_FIELDS = tuple(field.name for field in fields(Span))
_BOUNDS = {
    "start_ns": (0, LONGEST_RUN_NS),
    "end_ns": (0, LONGEST_RUN_NS),
    "step": (-1, MOST_STEPS),
    "group": (-1, SAMPLES_PER_STEP),
    "first": (0, SAMPLES_PER_STEP),
    "size": (0, SAMPLES_PER_STEP),
    "version": (-1, MOST_STEPS),
}


class SpanWriter:
    """Appends closed spans to the file and forwards them to `forward`."""

    def __init__(self, lines: JsonLines, forward: Callable[[Span], None]) -> None:
        self._lines, self._forward = lines, forward

    def add(self, span: Span) -> None:
        self._lines.append({name: getattr(span, name) for name in _FIELDS})
        self._forward(span)


def read_trace(
    path: Path, lanes: Sequence[LaneInfo], *, shared_cards: bool = False, shares_work: bool = False
) -> Trace:
    """The trace of a run with these lanes. It ends with the last span other than a publication."""
    names = frozenset(lane.name for lane in lanes)
    spans = sorted((_span(line, names) for line in located_lines(path)), key=lambda span: span.start_ns)
    end_ns = max((span.end_ns for span in spans if span.work is not Work.PUBLISH), default=0)
    return Trace(tuple(lanes), tuple(spans), end_ns, shared_cards, shares_work)


def _span(line: JsonLine, lanes: frozenset[str]) -> Span:
    try:
        span = _SPAN.validate_python(line.content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise line.error(f"not a span: {field}: {first['msg']}") from None
    for field, (least, most) in _BOUNDS.items():
        if not least <= getattr(span, field) <= most:
            given = shown(getattr(span, field))
            raise line.error(f"not a span: {field}: expected a number from {least} to {most}, got {given}")
    if span.lane not in lanes:
        raise line.error(f"unknown lane {span.lane!r}; run.json has: {', '.join(sorted(lanes))}")
    if span.end_ns < span.start_ns:
        raise line.error(f"the span ends at {span.end_ns} ns, before it starts at {span.start_ns} ns")
    return span
