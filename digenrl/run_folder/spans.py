"""The spans of a live run's trace, as lines of a file; `telemetry.report` reads them back."""

from __future__ import annotations

from typing import Any

from digenrl.telemetry.trace import Span


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
