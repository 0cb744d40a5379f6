"""Closed spans on their way to the file: what a lane does is never shown twice at one time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from digenrl.run_folder.lines import JsonLines
from digenrl.run_folder.spans import span_line
from digenrl.telemetry.trace import Span, Work


class SpanWriter:
    """Appends spans and hands them on.

    A slice that waited on its lane behind an evaluation, or training behind a checkpoint, began when that was
    over; publishing goes on beside everything else.
    """

    def __init__(self, lines: JsonLines, hand_on: Callable[[Span], None]) -> None:
        self._lines, self._hand_on = lines, hand_on
        self._busy_until_ns: dict[str, int] = {}

    def add(self, span: Span) -> None:
        """A span that has ended; those of one lane come in the order of their ends."""
        if span.work is not Work.PUBLISH:
            began = max(span.start_ns, min(self._busy_until_ns.get(span.lane, 0), span.end_ns))
            span = replace(span, start_ns=began)
            self._busy_until_ns[span.lane] = span.end_ns
        self._lines.append(span_line(span))
        self._hand_on(span)
