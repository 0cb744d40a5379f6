"""The spans of a live run's trace, appended as they close; `telemetry.report` reads them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from digenrl.runs.lines import JsonLines
from digenrl.telemetry.trace import Span


def span_writer(lines: JsonLines) -> Callable[[Span], None]:
    """What a recorder hands each closed span to; the file keeps them, the driver does not."""
    return lambda span: lines.append(span_line(span))


def span_line(span: Span) -> dict[str, Any]:
    """A span as JSON, field by field."""
    return {
        "lane": span.lane,
        "work": span.work.value,
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "step": span.step,
        "group": span.group,
        "first": span.first,
        "size": span.size,
        "version": span.version,
    }
