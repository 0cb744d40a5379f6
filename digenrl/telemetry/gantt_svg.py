"""The Gantt chart of a trace as a self-contained SVG: no scripts, no external fonts or files."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from xml.etree import ElementTree

from digenrl.telemetry import svg_parts as svg
from digenrl.telemetry.row_folding import FoldedRow, Row, fold_lanes
from digenrl.telemetry.stacked_work import stacked_work
from digenrl.telemetry.styles import fresh_style, percent, style_of, styles_in
from digenrl.telemetry.time_axis import horizon_ns, seconds_text, ticks_ns
from digenrl.telemetry.trace import LaneInfo, Span, Trace, Work
from digenrl.telemetry.utilization import LaneUse, lane_uses, pool_share, spans_by_lane

_MOST_ROWS = 40
_KEPT_OF_EACH_KIND = 8

# Lengths in pixels.
_WIDTH = 1100.0
_MARGIN = 20.0
_SHARE_WIDTH = 52.0
_TITLE_HEIGHT = 30.0
_COMMIT_LABEL_HEIGHT = 20.0
_POOL_HEADING_HEIGHT = 24.0
_ROW_PITCH = 25.0
_BLOCK_HEIGHT = 20.0
_PUBLISH_HEIGHT = 6.0
_AXIS_HEIGHT = 40.0
_LEGEND_LINE_HEIGHT = 22.0
_THINNEST_BLOCK = 0.8
_MOST_NAME_CHARACTERS = 24
_LABEL_SIZE = 10.0


@dataclass(frozen=True, slots=True)
class _Frame:
    """The horizontal extent of the plot: `left` is time 0, `right` the end of the axis."""

    left: float
    right: float
    until_ns: int

    def x(self, time_ns: int) -> float:
        return self.left + (self.right - self.left) * time_ns / self.until_ns


@dataclass(frozen=True, slots=True)
class _Drawing:
    """What every part of the drawing needs: layers from back to front, the frame, the trace by lane."""

    back: svg.Element
    blocks: svg.Element
    commit_lines: svg.Element
    labels: svg.Element
    frame: _Frame
    trace: Trace
    spans: dict[str, tuple[Span, ...]]
    uses: dict[str, LaneUse]


def gantt_svg(trace: Trace, title: str = "", axis_ns: int = 0) -> str:
    """Lanes as rows under their pool, blocks colored by work, idle time dotted, a line at every commit.

    The axis ends with the run, or at `axis_ns` if that is later, so that several runs can have the same scale.

    Every span of a lane with its own row is a `rect` of class "span" with a tooltip; every idle interval is one of
    class "idle". Folded lanes share a row that shows how many of them are busy at each time, and with what.
    """
    until_ns = max(1, axis_ns, horizon_ns(trace))
    rows = fold_lanes(trace.lanes, _MOST_ROWS, _KEPT_OF_EACH_KIND)
    names = [row.name for row in rows if isinstance(row, LaneInfo)]
    left = _MARGIN + 14 + max([svg.text_width(_shortened(name), 12) for name in names] + [60.0])
    image = svg.new_image(_WIDTH, title or "What every lane did, and when")
    drawing = _Drawing(
        back=svg.layer(image),
        blocks=svg.layer(image),
        commit_lines=svg.layer(image),
        labels=svg.layer(image),
        frame=_Frame(left, _WIDTH - _MARGIN - _SHARE_WIDTH, until_ns),
        trace=trace,
        spans=spans_by_lane(trace),
        uses=lane_uses(trace),
    )

    if title:
        svg.text(drawing.labels, _MARGIN, _MARGIN + 14, title, size=16, weight="600")
    plot_top = _MARGIN + _COMMIT_LABEL_HEIGHT + (_TITLE_HEIGHT if title else 0)
    bottom = plot_top + _rows_height(rows)
    _draw_grid(drawing, plot_top, bottom)
    _draw_rows(drawing, rows, plot_top)
    _draw_commits(drawing, plot_top, bottom)
    height = _draw_legend(drawing, bottom + _AXIS_HEIGHT) + _MARGIN
    image.set("height", f"{height:g}")
    image.set("viewBox", f"0 0 {_WIDTH:g} {height:g}")
    return ElementTree.tostring(image, encoding="unicode") + "\n"


def _pools(rows: tuple[Row, ...]) -> dict[str, list[Row]]:
    pools: dict[str, list[Row]] = {}
    for row in rows:
        lane = row if isinstance(row, LaneInfo) else row.lanes[0]
        pools.setdefault(lane.pool, []).append(row)
    return pools


def _rows_height(rows: tuple[Row, ...]) -> float:
    return len(_pools(rows)) * _POOL_HEADING_HEIGHT + len(rows) * _ROW_PITCH + 4


def _draw_grid(drawing: _Drawing, top: float, bottom: float) -> None:
    """The time axis below the rows, and a faint vertical line at each of its ticks."""
    frame = drawing.frame
    svg.line(drawing.back, frame.left, bottom, frame.right, bottom, svg.INK, width=1)
    for time_ns in ticks_ns(frame.until_ns, most_ticks=12):
        x = frame.x(time_ns)
        svg.line(drawing.back, x, top, x, bottom + 5, svg.GRID, width=1)
        svg.text(
            drawing.labels, x, bottom + 18, seconds_text(time_ns), size=11, fill=svg.FAINT_INK, anchor="middle"
        )
    svg.text(drawing.labels, frame.left - 12, bottom + 18, "seconds", size=11, fill=svg.FAINT_INK, anchor="end")


def _draw_rows(drawing: _Drawing, rows: tuple[Row, ...], top: float) -> None:
    svg.text(drawing.labels, _WIDTH - _MARGIN, top - 6, "busy", size=11, fill=svg.FAINT_INK, anchor="end")
    for pool, pool_rows in _pools(rows).items():
        _draw_pool_heading(drawing, pool, top)
        top += _POOL_HEADING_HEIGHT
        for row in pool_rows:
            if isinstance(row, LaneInfo):
                _draw_lane(drawing, row.name, top)
            else:
                _draw_folded(drawing, row, top)
            top += _ROW_PITCH


def _draw_pool_heading(drawing: _Drawing, pool: str, top: float) -> None:
    share = percent(pool_share(drawing.trace, pool, drawing.uses))
    baseline = top + _POOL_HEADING_HEIGHT - 7
    svg.text(drawing.labels, _MARGIN, baseline, pool, size=12, weight="600")
    if sum(lane.pool == pool for lane in drawing.trace.lanes) > 1:
        svg.text(drawing.labels, _WIDTH - _MARGIN, baseline, share, size=12, weight="600", anchor="end")


def _draw_lane(drawing: _Drawing, name: str, top: float) -> None:
    use, frame = drawing.uses[name], drawing.frame
    _draw_row_ends(drawing, name, _shortened(name), use.busy_share, top)
    for kind, intervals in (("elsewhere", use.elsewhere), ("idle", use.idle)):
        fill = svg.IDLE_FILL if kind == "idle" else svg.ELSEWHERE_FILL
        for start_ns, end_ns in intervals:
            x, width = frame.x(start_ns), frame.x(end_ns) - frame.x(start_ns)
            block = svg.rect(drawing.blocks, x, top, width, _BLOCK_HEIGHT, fill, kind)
            description = "idle" if kind == "idle" else "the card works in another row"
            _add_tooltip(block, f"{description}\n{name}, {_from_to(start_ns, end_ns)}")
    # A publication runs concurrently with other work: its strip is in front.
    for span in sorted(drawing.spans[name], key=lambda span: span.work is Work.PUBLISH):
        _draw_span(drawing, span, top)


def _draw_row_ends(drawing: _Drawing, name: str, label: str, share: float, top: float) -> None:
    baseline = top + _BLOCK_HEIGHT / 2 + 4
    lane_name = svg.text(drawing.labels, drawing.frame.left - 8, baseline, label, size=12, anchor="end")
    if name != label:
        _add_tooltip(lane_name, name)
    svg.text(drawing.labels, _WIDTH - _MARGIN, baseline, percent(share), size=12, fill=svg.FAINT_INK, anchor="end")


def _draw_span(drawing: _Drawing, span: Span, top: float) -> None:
    frame, style = drawing.frame, style_of(span)
    x = frame.x(span.start_ns)
    width = max(_THINNEST_BLOCK, frame.x(span.end_ns) - x)
    height = _BLOCK_HEIGHT
    if span.work is Work.PUBLISH:  # a strip at the bottom: it runs concurrently with other work
        height, top = _PUBLISH_HEIGHT, top + _BLOCK_HEIGHT - _PUBLISH_HEIGHT
    block = svg.rect(drawing.blocks, x, top, width, height, svg.fill_of(style), "span")
    # Outlines separate neighbors; they would hide a block of one or two pixels.
    if span.work is Work.HELP:
        block.set("stroke", "#0a4a3c")
        block.set("stroke-width", "1.4" if width > 4 else "0")
    elif width > 3:
        block.set("stroke", "#ffffff")
        block.set("stroke-width", "1")
    _add_tooltip(block, span_description(span))
    label = _widest_label_that_fits(span, width)
    if label:
        middle = x + width / 2
        halo = style.fill if style.stale else ""
        baseline = top + height / 2 + 3.5
        svg.text(
            drawing.labels, middle, baseline, label, size=_LABEL_SIZE, fill=style.ink, anchor="middle", halo=halo
        )


def _widest_label_that_fits(span: Span, width: float) -> str:
    if span.work is Work.PUBLISH:
        return ""
    if span.work in (Work.GENERATE, Work.HELP):
        labels = [f"g{span.group} v{span.version}", f"g{span.group}"]
    elif span.group >= 0:
        labels = [f"{span.work} g{span.group}", f"g{span.group}"]
    else:
        labels = [span.work.value]
    return next((label for label in labels if svg.text_width(label, _LABEL_SIZE) + 4 <= width), "")


def span_description(span: Span) -> str:
    """All facts about a span, in two lines.

    >>> print(span_description(Span("a100-0", Work.GENERATE, 0, 1_700_000_000, step=1, group=3, first=2, size=2)))
    generate, step 1, group 3, samples 2 to 3, version 0 (stale)
    a100-0, 0 s to 1.7 s (1.7 s)
    """
    facts = [span.work.value, f"step {span.step}"]
    if span.group >= 0:
        facts.append(f"group {span.group}")
    if span.size == 1:
        facts.append(f"sample {span.first}")
    elif span.size > 1:
        facts.append(f"samples {span.first} to {span.first + span.size - 1}")
    facts.append(f"version {span.version}{' (stale)' if span.stale else ''}")
    return f"{', '.join(facts)}\n{span.lane}, {_from_to(span.start_ns, span.end_ns)}"


def _from_to(start_ns: int, end_ns: int) -> str:
    return f"{seconds_text(start_ns)} s to {seconds_text(end_ns)} s ({seconds_text(end_ns - start_ns)} s)"


def _draw_folded(drawing: _Drawing, row: FoldedRow, top: float) -> None:
    """A dotted row with an area per kind of work, stacked: its height is the share of lanes that do it."""
    frame = drawing.frame
    name = f"{len(row.lanes)} more"
    _draw_row_ends(drawing, name, name, row.busy_share(drawing.uses), top)
    svg.rect(drawing.blocks, frame.left, top, frame.right - frame.left, _BLOCK_HEIGHT, svg.IDLE_FILL, "folded")
    spans = [span for lane in row.lanes for span in drawing.spans[lane.name]]
    lanes = f"{row.lanes[0].name} to {row.lanes[-1].name}"
    bottom = top + _BLOCK_HEIGHT
    for layer in reversed(stacked_work(spans)):  # the highest lies behind the others
        path = [f"M{frame.left:.2f} {bottom:.2f}"]
        for time_ns, busy_lanes in layer.levels:
            path.append(f"H{frame.x(time_ns):.2f}V{bottom - _BLOCK_HEIGHT * busy_lanes / len(row.lanes):.2f}")
        area = {"class": "area", "d": f"{''.join(path)}Z", "fill": _light(fresh_style(layer.work).fill)}
        shape = ElementTree.SubElement(drawing.blocks, "path", area)
        _add_tooltip(shape, f"{lanes}\nhow many of them {layer.work}, over time")


def _light(color: str) -> str:
    """The color, mixed with as much white: folded rows are fainter than the blocks of single lanes."""
    parts = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{(part + 255) // 2:02x}" for part in parts)


def _draw_commits(drawing: _Drawing, top: float, bottom: float) -> None:
    """A dashed line through all rows at the end of each commit, labeled where there is room."""
    commits = [span for spans in drawing.spans.values() for span in spans if span.work is Work.COMMIT]
    commits.sort(key=lambda span: span.end_ns)
    frame, free_from = drawing.frame, 0.0
    places = [frame.x(span.end_ns) for span in commits]
    labels = [f"commit {span.step + 1} / v{span.step + 1}" for span in commits]
    widest = max((svg.text_width(label, 11) + 8 for label in labels), default=0)
    if any(right - left < widest for left, right in pairwise(places)):
        labels = [f"v{span.step + 1}" for span in commits]
    for x, label in zip(places, labels, strict=True):
        drawn = svg.line(drawing.commit_lines, x, top - 2, x, bottom, svg.INK, width=1.1, dash="4 3")
        drawn.set("class", "commit")
        width = svg.text_width(label, 11)
        middle = min(max(x, frame.left + width / 2), frame.right - width / 2)
        if middle - width / 2 >= free_from:
            svg.text(drawing.labels, middle, top - 7, label, size=11, anchor="middle", weight="600")
            free_from = middle + width / 2 + 5


def _draw_legend(drawing: _Drawing, top: float) -> float:
    """Swatches and labels for what occurs in the chart; returns the y coordinate where the legend ends."""
    entries = [(svg.fill_of(style), style.label) for style in styles_in(drawing.trace.spans)]
    entries.append((svg.IDLE_FILL, "idle: a bubble"))
    if any(use.elsewhere for use in drawing.uses.values()):
        entries.append((svg.ELSEWHERE_FILL, "the card works in another row"))
    x, right = drawing.frame.left, _WIDTH - _MARGIN
    for fill, label in entries:
        width = 20 + svg.text_width(label, 12) + 20
        if x + width - 20 > right:
            x, top = drawing.frame.left, top + _LEGEND_LINE_HEIGHT
        swatch = svg.rect(drawing.blocks, x, top, 14, 14, fill, "legend")
        swatch.set("stroke", "#0a4a3c" if label.startswith("trainer helps") else svg.GRID)
        svg.text(drawing.labels, x + 20, top + 11, label, size=12)
        x += width
    return top + _LEGEND_LINE_HEIGHT


def _shortened(name: str) -> str:
    """A long name without its middle, as lanes of one kind differ at the end."""
    if len(name) <= _MOST_NAME_CHARACTERS:
        return name
    return f"{name[: _MOST_NAME_CHARACTERS - 11]}…{name[-10:]}"


def _add_tooltip(element: svg.Element, content: str) -> None:
    ElementTree.SubElement(element, "title").text = svg.printable(content)
