"""The Gantt chart of a trace for a terminal, readable with and without color."""

from __future__ import annotations

from collections.abc import Iterable

from rich.style import Style
from rich.text import Text

from digenrl.telemetry.row_folding import FoldedRow, Row, fold_lanes
from digenrl.telemetry.styles import WorkStyle, fresh_style, percent, style_of, styles_in
from digenrl.telemetry.time_axis import horizon_ns, seconds_text, ticks_ns
from digenrl.telemetry.trace import Span, Trace, Work
from digenrl.telemetry.utilization import Intervals, LaneUse, lane_uses, spans_by_lane

_MOST_ROWS = 24
_KEPT_OF_EACH_KIND = 4
_NARROWEST_BAR = 20
_SHARE_WIDTH = len(" 100 %")
_IDLE, _MOSTLY_IDLE, _ELSEWHERE = ".", ":", " "
_FAINT = Style(dim=True)


def gantt_text(trace: Trace, width: int) -> Text:
    """One row per lane, `width` characters wide: name, work over time, busy share.

    A column shows the letter of the work that filled most of it, "." for no work, ":" for work in less than half
    of it, and "C" if a commit touches it, however short. A block starts with its group's number where that fits:
    "12ggg". A blank is time in which the card works in another row.
    """
    if not trace.lanes or not horizon_ns(trace):
        return Text("nothing ran\n")
    rows = fold_lanes(trace.lanes, _MOST_ROWS, _KEPT_OF_EACH_KIND)
    spans, uses = spans_by_lane(trace), lane_uses(trace)
    longest_name = max(len(lane.name) for lane in trace.lanes)
    name_width = min(longest_name, max(8, width // 5))
    columns = max(_NARROWEST_BAR, width - name_width - 1 - _SHARE_WIDTH)

    chart = Text(no_wrap=True, overflow="crop")
    for row in rows:
        chart.append_text(_row_text(row, spans, uses, horizon_ns(trace), name_width, columns))
    chart.append_text(_axis(horizon_ns(trace), name_width, columns))
    chart.append_text(_legend(trace.spans, uses.values(), width))
    return chart


def _row_text(
    row: Row,
    spans: dict[str, tuple[Span, ...]],
    uses: dict[str, LaneUse],
    until_ns: int,
    name_width: int,
    columns: int,
) -> Text:
    if isinstance(row, FoldedRow):
        busy = percent(row.busy_share(uses))
        return Text(f"{'...':<{name_width}} {len(row.lanes)} more like these, {busy} busy\n", style=_FAINT)
    name, use = row.name, uses[row.name]
    text = Text(f"{_shortened(name, name_width):<{name_width}} ")
    text.append_text(_bar(spans[name], use.elsewhere, until_ns, columns))
    text.append(f"{percent(use.busy_share):>{_SHARE_WIDTH}}\n")
    return text


def _shortened(name: str, width: int) -> str:
    """A long name without its middle, as lanes of one kind differ at the end."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}~{name[len(name) - tail :]}"


def _bar(spans: tuple[Span, ...], elsewhere: Intervals, until_ns: int, columns: int) -> Text:
    owners = _owners(spans, elsewhere, until_ns, columns)
    letters = [owner if isinstance(owner, str) else style_of(owner).letter for owner in owners]
    _write_group_numbers(owners, letters)
    bar = Text()
    for owner, letter in zip(owners, letters, strict=True):
        bar.append(letter, style=_FAINT if isinstance(owner, str) else _terminal_style(style_of(owner)))
    return bar


def _owners(spans: tuple[Span, ...], elsewhere: Intervals, until_ns: int, columns: int) -> list[Span | str]:
    """The content of each column: the span that fills most of it, or a symbol if there is none.

    Times are in units of 1 / columns ns, in which every column is exactly `until_ns` long.
    """
    covers: list[dict[Span | str, int]] = [{} for _ in range(columns)]
    commits: dict[int, Span] = {}
    for span in spans:
        for column, covered in _columns_covered(span.start_ns, span.end_ns, until_ns, columns):
            covers[column][span] = covered
            if span.work is Work.COMMIT:
                commits[column] = span
    for start_ns, end_ns in elsewhere:
        for column, covered in _columns_covered(start_ns, end_ns, until_ns, columns):
            covers[column][_ELSEWHERE] = covers[column].get(_ELSEWHERE, 0) + covered
    return [commits.get(column) or _owner(cover, until_ns) for column, cover in enumerate(covers)]


def _columns_covered(start_ns: int, end_ns: int, until_ns: int, columns: int) -> Iterable[tuple[int, int]]:
    """(column, covered length) for each column that an interval touches; an empty interval touches one."""
    start, end = start_ns * columns, end_ns * columns
    first = min(start // until_ns, columns - 1)
    last = max(first, (end - 1) // until_ns)
    for column in range(first, last + 1):
        yield column, max(0, min(end, (column + 1) * until_ns) - max(start, column * until_ns))


def _owner(cover: dict[Span | str, int], column_length: int) -> Span | str:
    # Publishing runs concurrently with other work, so it is shown only where there is nothing else.
    work = {key: covered for key, covered in cover.items() if not _is_publish(key) and covered}
    if 2 * sum(work.values()) >= column_length:
        return max(work, key=work.__getitem__)
    if any(isinstance(key, Span) for key in work):
        return _MOSTLY_IDLE
    publishing = [key for key, covered in cover.items() if _is_publish(key) and 2 * covered >= column_length]
    return publishing[0] if publishing else _IDLE


def _is_publish(key: Span | str) -> bool:
    return isinstance(key, Span) and key.work is Work.PUBLISH


def _write_group_numbers(owners: list[Span | str], letters: list[str]) -> None:
    """Puts the group's number at the start of each block that has room for a letter after it."""
    start = 0
    for column in range(1, len(owners) + 1):
        if column < len(owners) and owners[column] is owners[start]:
            continue
        owner = owners[start]
        if isinstance(owner, Span) and owner.group >= 0:
            number = str(owner.group)
            if column - start > len(number):
                letters[start : start + len(number)] = number
        start = column


def _terminal_style(style: WorkStyle) -> Style:
    if style is fresh_style(Work.COMMIT):  # nearly black: invisible on a dark terminal
        return Style(reverse=True, bold=True)
    return Style(color=style.ink, bgcolor=style.fill)


def _axis(until_ns: int, name_width: int, columns: int) -> Text:
    """A ruler with a mark at each tick, and the seconds below the marks."""
    widest_label = len(seconds_text(until_ns)) + 3
    ruler, labels = ["-"] * columns, [" "] * (columns + _SHARE_WIDTH)
    times_ns = ticks_ns(until_ns, max(1, min(10, columns // widest_label)))
    for time_ns in times_ns:
        column = min(time_ns * columns // until_ns, columns - 1)
        label = seconds_text(time_ns) + (" s" if time_ns == times_ns[-1] else "")
        ruler[column] = "+"
        labels[column : column + len(label)] = label
    margin = " " * (name_width + 1)
    return Text(f"{margin}{''.join(ruler)}\n{margin}{''.join(labels).rstrip()}\n", style=_FAINT)


def _legend(spans: tuple[Span, ...], uses: Iterable[LaneUse], width: int) -> Text:
    """The letters that occur and their labels, wrapped between entries."""
    entries = [(style.letter, style.label, _terminal_style(style)) for style in styles_in(spans)]
    entries += [
        ("0-9", "a block's group", Style()),
        (_IDLE, "idle", _FAINT),
        (_MOSTLY_IDLE, "mostly idle", _FAINT),
    ]
    if any(use.elsewhere for use in uses):
        entries.append(("(blank)", "the card works in another row", _FAINT))
    legend, used = Text(), 0
    for letter, label, style in entries:
        entry_width = len(letter) + 1 + len(label)
        if used and used + 3 + entry_width > width:
            legend.append("\n")
            used = 0
        elif used:
            legend.append("   ")
            used += 3
        legend.append(letter, style=style)
        legend.append(f" {label}")
        used += entry_width
    legend.append("\n")
    return legend
