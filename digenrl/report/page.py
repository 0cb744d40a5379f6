"""Writes the report, a self-contained HTML file, and the trace for Perfetto."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from digenrl.config.reading import mapped
from digenrl.report.content import content_of
from digenrl.run_folder.reading import RunRecord
from digenrl.telemetry.perfetto import write_perfetto
from digenrl.telemetry.writing import write_atomically

# In order of dependence.
_SCRIPTS = (
    "dom.js",
    "format.js",
    "summary.js",
    "grids.js",
    "charts.js",
    "gantt_lanes.js",
    "gantt_paint.js",
    "gantt.js",
    "tables.js",
    "totals.js",
    "main.js",
)


def write_report(run: RunRecord, out: Path | None = None) -> Path:
    """Writes the report and the trace into `out`, by default the run's folder, each atomically.

    Returns the page's path.
    """
    page, trace = (path if out is None else out / path.name for path in (run.folder.report, run.folder.trace))
    write_perfetto(run.trace, trace)
    write_atomically(page, page_of(run))
    return page


def page_of(run: RunRecord) -> str:
    """The page. Its content security policy forbids loading anything, and all scripts except its own."""
    style = _asset("style.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in _SCRIPTS) + "})();\n"
    sources = f"style-src '{_fingerprint(style)}'; script-src '{_fingerprint(script)}'"
    policy = f"default-src 'none'; img-src data:; media-src data:; {sources}"
    return Template(_asset("page.html")).substitute(
        title=html.escape(run.info.name),
        policy=policy,
        style=style,
        script=script,
        content=embedded(content_of(run)),
    )


def embedded(content: Any) -> str:
    """JSON that is safe inside a script element: it cannot close the element or open a comment.

    >>> embedded({"prompt": "</script><!--", "share": float("nan")})
    '{"prompt":"\\\\u003c/script\\\\u003e\\\\u003c!--","share":null}'
    """
    text = json.dumps(mapped(content, _plain), separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plain(value: Any) -> Any:
    """Floats are rounded, and null if JSON does not have them."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _asset(name: str) -> str:
    return files("digenrl.report").joinpath(name).read_text(encoding="utf-8")


def _fingerprint(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
