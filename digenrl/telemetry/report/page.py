"""Writes the report: one HTML file that needs nothing else, and the trace for Perfetto beside it."""

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

from digenrl.telemetry.perfetto import write_perfetto
from digenrl.telemetry.report.content import content_of
from digenrl.telemetry.report.reading import read_run
from digenrl.telemetry.report.records import RunRecord
from digenrl.telemetry.writing import write_atomically

# In the order in which they need each other.
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
    "main.js",
)


def write_report(folder: Path) -> Path:
    """Writes `report.html` and `trace.json` into a run's folder, whole or not at all; returns the page's path."""
    run = read_run(folder)
    write_perfetto(run.trace, folder / "trace.json")
    page = folder / "report.html"
    write_atomically(page, page_of(run))
    return page


def page_of(run: RunRecord) -> str:
    """The page. Its policy lets it load nothing from anywhere, and run no script but its own."""
    style = _asset("style.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in _SCRIPTS) + "})();\n"
    own = f"style-src '{_fingerprint(style)}'; script-src '{_fingerprint(script)}'"
    policy = f"default-src 'none'; img-src data:; {own}"
    return Template(_asset("page.html")).substitute(
        title=html.escape(run.name), policy=policy, style=style, script=script, content=embedded(content_of(run))
    )


def embedded(content: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or open a comment.

    >>> embedded({"prompt": "</script><!--", "share": float("nan")})
    '{"prompt":"\\\\u003c/script\\\\u003e\\\\u003c!--","share":null}'
    """
    text = json.dumps(_plain(content), separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plain(content: Any) -> Any:
    """Floats short enough to read, and null for what JSON cannot hold."""
    if isinstance(content, float):
        return float(f"{content:.6g}") if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return content


def _asset(name: str) -> str:
    return files("digenrl.telemetry.report").joinpath(name).read_text(encoding="utf-8")


def _fingerprint(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
