"""The SVG Gantt: well formed, self-contained, and every span in its place once."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from handmade_traces import SECOND, both_trace, helped_trace, large_trace, on_policy_trace, span

from digenrl.telemetry.gantt_svg import gantt_svg, span_description
from digenrl.telemetry.styles import fresh_style, style_of
from digenrl.telemetry.trace import LaneInfo, Trace, Work
from digenrl.telemetry.utilization import lane_uses

SVG = "{http://www.w3.org/2000/svg}"
TRACES = pytest.mark.parametrize("trace", [on_policy_trace(), helped_trace(), both_trace(), large_trace()])


def parse(trace: Trace, title: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(gantt_svg(trace, title))


def rects(picture: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [rect for rect in picture.iter(f"{SVG}rect") if rect.get("class") == kind]


def tooltip(element: ElementTree.Element) -> str:
    return element.findtext(f"{SVG}title") or ""


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name])


def words_in(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def commit_labels(picture: ElementTree.Element) -> list[str]:
    return [words for words in words_in(picture) if re.fullmatch(r"(commit \d+ / )?v\d+", words)]


@TRACES
def test_every_span_is_drawn_once_with_its_tooltip(trace: Trace) -> None:
    drawn = Counter(tooltip(rect) for rect in rects(parse(trace), "span"))
    assert drawn == Counter(span_description(one) for one in trace.spans)


@TRACES
def test_every_bubble_is_drawn_once(trace: Trace) -> None:
    bubbles = sum(len(use.idle) for use in lane_uses(trace).values())
    assert len(rects(parse(trace), "idle")) == bubbles > 0


@TRACES
def test_blocks_of_a_row_do_not_overlap(trace: Trace) -> None:
    rows: dict[float, list[tuple[float, float]]] = {}
    for rect in [*rects(parse(trace), "span"), *rects(parse(trace), "idle")]:
        if tooltip(rect).startswith(("publish", "commit")):  # concurrent with other work, or of no length
            continue
        left = number(rect, "x")
        rows.setdefault(number(rect, "y"), []).append((left, left + number(rect, "width")))
    assert len(rows) == len(trace.lanes)
    for blocks in rows.values():
        for (_, end), (start, _) in pairwise(sorted(blocks)):
            assert start >= end - 0.03


def test_a_block_is_as_wide_as_its_share_of_the_axis() -> None:
    blocks = {tooltip(rect).split("\n")[1]: rect for rect in rects(parse(on_policy_trace()), "span")}
    two_s = number(blocks["fast, 0 s to 2 s (2 s)"], "width")
    assert number(blocks["slow, 3 s to 6 s (3 s)"], "width") == pytest.approx(1.5 * two_s, abs=0.02)
    start = number(blocks["fast, 0 s to 2 s (2 s)"], "x")
    assert number(blocks["fast, 10 s to 12 s (2 s)"], "x") == pytest.approx(start + 5 * two_s, abs=0.05)


def test_runs_drawn_to_one_scale_have_blocks_of_one_width() -> None:
    def width_of_two_seconds(axis_s: int) -> float:
        picture = ElementTree.fromstring(gantt_svg(on_policy_trace(), axis_ns=axis_s * SECOND))
        blocks = {tooltip(rect).split("\n")[1]: rect for rect in rects(picture, "span")}
        return number(blocks["fast, 0 s to 2 s (2 s)"], "width")

    assert width_of_two_seconds(38) == pytest.approx(width_of_two_seconds(0) / 2, abs=0.02)
    assert width_of_two_seconds(5) == width_of_two_seconds(0)


def test_blocks_are_labeled_with_group_and_version_where_they_fit() -> None:
    words = Counter(words_in(parse(on_policy_trace())))
    assert words["g0 v0"] == words["g1 v0"] == words["g0 v1"] == words["g1 v1"] == 2
    assert words["train g0"] == words["train g1"] == 2
    assert "g0 v0" not in words_in(parse(large_trace(generators=3, steps=60)))


def test_a_line_with_a_label_stands_where_each_commit_ends() -> None:
    picture = parse(on_policy_trace())
    lines = [line for line in picture.iter(f"{SVG}line") if line.get("class") == "commit"]
    commits = [rect for rect in rects(picture, "span") if tooltip(rect).startswith("commit")]
    ends = [number(rect, "x") + number(rect, "width") for rect in commits]
    assert [number(line, "x1") for line in lines] == pytest.approx(ends, abs=0.02)
    assert {"commit 1 / v1", "commit 2 / v2"} <= set(words_in(picture))


def test_labels_of_close_commits_are_all_short() -> None:
    labels = commit_labels(parse(large_trace(generators=3, steps=20)))
    assert labels == [f"v{step}" for step in range(1, 21)]


def test_labels_of_crowded_commits_are_omitted_rather_than_overlaid() -> None:
    picture = parse(large_trace(generators=3, steps=60))
    labels = commit_labels(picture)
    lines = [line for line in picture.iter(f"{SVG}line") if line.get("class") == "commit"]
    assert len(lines) == 60 > len(labels) > 0


def test_stale_slices_are_hatched_and_helped_ones_outlined() -> None:
    trace = Trace(
        (LaneInfo("trainer", "trainer"), LaneInfo("helper-0", "trainer"), LaneInfo("gen", "generator")),
        (
            span("gen", Work.GENERATE, 0, 2, step=1, version=0, group=0, size=1),
            span("gen", Work.GENERATE, 2, 4, step=1, version=1, group=0, first=1, size=1),
            span("helper-0", Work.HELP, 0, 2, step=1, version=0, group=1, size=1),
            span("helper-0", Work.HELP, 2, 4, step=1, version=1, group=1, first=1, size=1),
        ),
        4 * SECOND,
    )
    picture = parse(trace)
    patterns = {f"url(#{pattern.get('id')})" for pattern in picture.iter(f"{SVG}pattern")}
    blocks = {tooltip(rect): rect for rect in rects(picture, "span")}
    for one in trace.spans:
        block = blocks[span_description(one)]
        assert (block.attrib["fill"] in patterns) == one.stale
        assert (block.attrib["stroke"] != "#ffffff") == (one.work is Work.HELP)
        assert one.stale or block.attrib["fill"] == style_of(one).fill
    assert len({block.attrib["fill"] for block in blocks.values()}) == 4


def test_a_publication_is_drawn_in_front_of_concurrent_training() -> None:
    trace = Trace(
        (LaneInfo("trainer", "trainer"),),
        (
            span("trainer", Work.PUBLISH, 0, 1, version=1),
            span("trainer", Work.TRAIN, 0, 4, group=0, size=1),
        ),
        4 * SECOND,
    )
    assert [tooltip(rect).split(",")[0] for rect in rects(parse(trace), "span")] == ["train", "publish"]


def test_names_and_titles_are_escaped() -> None:
    name, title = 'a<b>&"c"\x1b', "P < G & <script>alert(1)</script> \x00"
    trace = Trace((LaneInfo(name, "<pool>"),), (span(name, Work.TRAIN, 0, 1, group=0, size=1),), SECOND)
    markup = gantt_svg(trace, title)
    assert "<script" not in markup
    words = words_in(ElementTree.fromstring(markup))
    assert name.replace("\x1b", "\ufffd") in words and "<pool>" in words
    assert title.replace("\x00", "\ufffd") in words


def test_the_image_is_self_contained() -> None:
    markup = gantt_svg(large_trace(), "large")
    for reference in ("href", "@import", "@font-face", "<script", "<image", "<foreignObject"):
        assert reference not in markup
    assert markup.count("http") == markup.count('xmlns="http://www.w3.org/2000/svg"') == 1


def test_many_lanes_are_folded_into_a_row_with_their_number_and_share() -> None:
    trace = large_trace(generators=96)
    picture = parse(trace, "many")
    assert {"56 more", "24 more"} <= set(words_in(picture))
    assert len(rects(picture, "folded")) == 2
    shown = {tooltip(rect) for rect in rects(picture, "span")}
    in_folds = {f"a100-{i}" for i in range(8, 64)} | {f"l40s-{i}" for i in range(8, 32)}
    assert shown == {span_description(one) for one in trace.spans if one.lane not in in_folds}


def test_everything_is_inside_the_image() -> None:
    picture = parse(large_trace(), "inside")
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for kind in ("span", "idle", "elsewhere", "legend"):
        for rect in rects(picture, kind):
            assert 0 <= number(rect, "x") <= number(rect, "x") + number(rect, "width") <= width
            assert 0 <= number(rect, "y") <= number(rect, "y") + number(rect, "height") <= height


def test_an_empty_trace_still_gives_an_image() -> None:
    assert parse(Trace((), (), 0)).tag == f"{SVG}svg"


def test_a_lane_that_does_both_shows_generating_training_and_sending_in_their_colors() -> None:
    picture = parse(both_trace())
    fills = {
        tooltip(rect).split(",")[0]: rect.attrib["fill"]
        for rect in rects(picture, "span")
        if "\ngen, " in tooltip(rect)
    }
    assert fills == {work: fresh_style(work).fill for work in (Work.GENERATE, Work.TRAIN, Work.SEND)}
    assert {"send gradients", "trainer helps generate"} <= set(words_in(picture))
    assert not {"send gradients", "switch of role"} & set(words_in(parse(on_policy_trace())))


def test_folded_lanes_that_do_both_show_an_area_per_kind_of_work() -> None:
    names = [f"a100-{index}" for index in range(50)]
    spans = [span(name, Work.GENERATE, 0, 2, group=0, size=1) for name in names]
    spans += [span(name, Work.TRAIN, 2, 3, group=0, size=1) for name in names]
    trace = Trace(tuple(LaneInfo(name, "generator") for name in names), tuple(spans), 3 * SECOND, shares_work=True)
    areas = [path for path in parse(trace).iter(f"{SVG}path") if path.get("class") == "area"]
    assert [tooltip(area).splitlines()[1] for area in areas] == [
        "how many of them train, over time",
        "how many of them generate, over time",
    ]
    assert len({area.attrib["fill"] for area in areas}) == 2
