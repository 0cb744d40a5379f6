"""The report in a real browser: pointed at, zoomed, and navigated by keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from handmade_runs import (
    AFTER_COLORS,
    BEFORE_COLORS,
    NASTY_PROMPT,
    both_recipe,
    evaluation_rows,
    metrics_rows,
    write_grid,
    write_run,
)
from handmade_traces import both_trace, large_trace
from headless_browser import NAMES, Page, browser_page, find_browser

from digenrl.report import timeline
from digenrl.report.page import write_report as write_report_of
from digenrl.run_folder.folder import RunFolder
from digenrl.run_folder.reading import read_run
from digenrl.worker.clips import write_clip

SECTIONS = ("samples", "curves", "timeline", "utilization", "prediction", "recipe")
GENERATE, TRAIN, SEND = [79, 134, 217], [242, 165, 65], [198, 93, 46]
CONTROL, SHIFT = 2, 8  # modifiers, as the protocol numbers them


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    browser = find_browser()
    if browser is None:
        pytest.skip(
            f"no browser found; install one of {', '.join(NAMES)}, as by: apt-get install chromium-headless-shell"
        )
    with browser_page(browser, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The handmade run: two steps, commits at 9 s and 19 s."""
    return write_report(write_run(tmp_path_factory.mktemp("runs") / "run"))


def write_report(folder: Path) -> Path:
    return write_report_of(read_run(folder))


def view(page: Page) -> tuple[float, float]:
    """The visible part of the timeline, in seconds."""
    first, last = page.evaluate("(({from, to}) => [from, to])(document.getElementById('gantt').dataset)")
    return float(first), float(last)


def at_second(page: Page, lane: int, second: float) -> tuple[float, float]:
    """The window coordinates of a time on a lane of the handmade run, by its index."""
    left, top, width, _ = page.place_of("#gantt")
    first, last = view(page)
    plot_left, plot_right = left + 118, left + width - 52
    # Two generators under one heading, the reward lane and the trainer under one each.
    heading = (1, 1, 2, 3)[lane]
    y = top + 20 + 24 * heading + 26 * lane + 5
    return plot_left + (plot_right - plot_left) * (second - first) / (last - first), y


def color_at(page: Page, selector: str, x: float, y: float) -> list[int]:
    """The color of one pixel of a canvas."""
    canvas = f"document.querySelector({json.dumps(selector)})"
    pixel = f"{canvas}.getContext('2d').getImageData({round(x)}, {round(y)}, 1, 1).data"
    return list(page.evaluate(f"Array.from({pixel}).slice(0, 3)"))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 380])
def test_the_page_shows_every_section_without_errors(page: Page, report: Path, width: int, dark: bool) -> None:
    page.open(report, width=width, dark=dark)
    assert page.errors == []
    for section in SECTIONS:
        assert page.text(f"#{section} h2"), f"{section} is hidden"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(18, 22, 27)" if dark else "rgb(255, 255, 255)")


def test_the_header_shows_the_run_and_its_headline(page: Page, report: Path) -> None:
    page.open(report)
    assert page.text("h1") == "handmade"
    assert page.text("#status").startswith("✓ finished, started 2026-01-02 03:04:05 UTC")
    assert page.text("#techniques li.off").split() == ["TAG", "off"]
    headline = page.text("#headline").replace("\u202f", " ")
    for words in ("0.250 → 0.500", "Held-out ocr.exact", "0.000 → 0.750", "13 %", "± 10.0 %"):
        assert words in headline


def test_grids_are_cut_into_cells_and_a_prompt_stays_text(page: Page, report: Path) -> None:
    page.open(report)
    page.wait_for("document.querySelectorAll('#grid-after .cell canvas')[3].width === 8")
    for grid, colors in (("before", BEFORE_COLORS), ("after", AFTER_COLORS)):
        for corner in (0, 7):
            cells = [f"#grid-{grid} .cell:nth-child({place}) canvas" for place in (1, 2, 3, 4)]
            shown = [color_at(page, cell, corner, corner) for cell in cells]
            assert shown == [list(color) for color in colors]
    assert NASTY_PROMPT in page.text("#grid-after .cell:nth-child(2) figcaption")
    assert page.evaluate("document.images.length") == 0


def test_a_clip_that_the_browser_cannot_play_leaves_the_image(page: Page, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "samples" / "step_000002_0000.mp4").write_bytes(b"not a video")
    page.open(write_report(folder))
    page.wait_for("document.querySelectorAll('#grid-after .cell canvas')[3].width === 8")
    assert page.errors == []
    assert color_at(page, "#grid-after .cell:nth-child(1) canvas", 4, 4) == list(AFTER_COLORS[0])


def test_a_clip_plays_in_the_place_of_its_image(page: Page, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    folder = write_run(tmp_path / "run")
    write_clip(torch.rand(8, 3, 16, 16), folder / "samples" / "step_000002_0000.mp4")
    page.open(write_report(folder))
    if not page.evaluate("document.createElement('video').canPlayType('video/mp4; codecs=\"avc1.64000a\"')"):
        pytest.skip("this browser has no decoder for H.264")
    page.wait_for("document.querySelector('#grid-after .cell:nth-child(1) video')?.currentTime > 0")
    assert page.errors == []
    assert page.evaluate("document.querySelectorAll('#grid-after .cell canvas').length") == 3


def test_pointing_at_a_sample_shows_its_parts_and_marks_the_same_prompt_in_both_grids(
    page: Page, report: Path
) -> None:
    page.open(report)
    left, top, width, height = page.place_of("#grid-after .cell:nth-child(1)")
    page.mouse("mouseMoved", left + width / 2, top + height / 4)
    assert "reward 1.00, ocr.exact 1" in page.text("#grid-after .cell:nth-child(1) .tip")
    assert page.evaluate("document.querySelectorAll('.cell.twin').length") == 2
    page.mouse("mouseMoved", 1, 1)
    assert page.evaluate("document.querySelectorAll('.cell.twin').length") == 0


def test_the_slider_selects_an_intermediate_evaluation(page: Page, tmp_path: Path) -> None:
    before, after = evaluation_rows()
    between = {**after, "step": 1, "grid": "samples/step_000001.png"}
    folder = write_run(tmp_path / "run", evaluations=[before, between, after])
    write_grid(folder, 1, ((9, 9, 9), (8, 8, 8), (7, 7, 7), (6, 6, 6)), rewards=(0.5, 0.5, 0.5, 0.5))
    page.open(write_report(folder))
    assert page.text("#grid-after h3") == "After: step 2, reward 0.800"
    page.evaluate("document.getElementById('grid-chooser').focus()")
    page.key("ArrowLeft")
    assert page.text("#grid-after h3") == "During: step 1, reward 0.800"
    page.wait_for("document.querySelector('#grid-after .cell canvas').width === 8")
    assert color_at(page, "#grid-after .cell canvas", 4, 4) == [9, 9, 9]


def test_pointing_at_one_curve_shows_the_values_of_all(page: Page, report: Path) -> None:
    page.open(report)
    reading = "#charts-health .reading"
    assert page.text(reading) == "step 1: 0.4000"
    left, top, _, height = page.place_of("#chart-reward svg")
    page.mouse("mouseMoved", left + 50, top + height / 2)
    assert page.text("#chart-reward .reading") == "step 0: 0.2500 ± 0.1000"
    assert page.text(reading) == "step 0: 0.4000"
    page.evaluate("document.querySelector('#chart-reward svg').focus()")
    page.key("ArrowRight")
    assert page.text(reading) == "step 1: 0.4000"


def test_long_tick_labels_fit(page: Page, tmp_path: Path) -> None:
    rows = metrics_rows()
    for row, reward, ratio in zip(rows, (-216.61811, -216.62672), (1.00001, 1.00002), strict=True):
        row |= {
            "reward_mean": reward,
            "reward_std": 0.0,
            "reward/size": reward,
            "ratio_max": ratio,
            "ratio_mean": 1,
        }
    evaluations = [{**row, "step": 5_000 * row["step"]} for row in evaluation_rows()]
    page.open(write_report(write_run(tmp_path / "run", metrics=rows, evaluations=evaluations)))
    ticks = "[...document.querySelectorAll('.chart .axis text')]"
    assert "−216.620" in page.evaluate(f"{ticks}.map((each) => each.textContent)")
    assert page.evaluate(f"Math.min(...{ticks}.map((each) => each.getBBox().x))") >= 0
    over = "each.getBBox().x + each.getBBox().width - each.ownerSVGElement.clientWidth"
    assert "10000" in page.evaluate(f"{ticks}.map((each) => each.textContent)")
    assert page.evaluate(f"Math.max(...{ticks}.map((each) => {over}))") <= 0


def test_work_is_painted_where_it_happened(page: Page, report: Path) -> None:
    page.open(report)
    assert view(page) == (0.0, 19.0)
    left, top, _, _ = page.place_of("#gantt")
    for lane, second, color in ((0, 1.0, GENERATE), (1, 5.5, GENERATE), (3, 4.0, TRAIN)):
        x, y = at_second(page, lane, second)
        assert color_at(page, "#gantt", x - left, y - top) == color
    x, y = at_second(page, 0, 7.0)
    assert color_at(page, "#gantt", x - left, y - top) not in (GENERATE, TRAIN)


def test_pointing_at_work_shows_its_ids_and_pointing_at_a_bubble_its_length(page: Page, report: Path) -> None:
    page.open(report)
    page.mouse("mouseMoved", *at_second(page, 3, 5.3))
    words = page.text("#gantt-tip")
    assert words.splitlines() == [
        "train, 2 s",
        "step 0, group 0, samples 0 to 1",
        "weights version 0",
        "trainer, from 3.500 s to 5.500 s",
    ]
    page.mouse("mouseMoved", *at_second(page, 0, 7.0))
    assert page.text("#gantt-tip").splitlines() == ["idle, 6 s", "fast, from 4.000 s to 10.000 s"]
    page.mouse("mouseMoved", 1, 1)
    assert page.evaluate("document.getElementById('gantt-tip').hidden")


def test_buttons_and_the_step_chooser_move_the_view(page: Page, report: Path) -> None:
    page.open(report)
    page.click("#gantt-in")
    assert view(page) == pytest.approx((4.75, 14.25))
    page.click("#gantt-right")
    assert view(page) == pytest.approx((9.5, 19.0))
    page.click("#gantt-previous")
    first, last = view(page)
    assert first == 0.0 and 9.0 < last < 9.5
    assert page.evaluate("document.getElementById('gantt-step').value") == "0"
    page.click("#gantt-whole")
    assert view(page) == (0.0, 19.0)


def test_the_wheel_zooms_with_a_modifier_only_and_keeps_what_is_under_the_pointer(
    page: Page, report: Path
) -> None:
    page.open(report)
    x, y = at_second(page, 0, 4.0)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200, modifiers=CONTROL)
    first, last = view(page)
    assert last - first < 15
    assert at_second(page, 0, 4.0)[0] == pytest.approx(x, abs=1)
    before = view(page)
    page.mouse("mouseWheel", *at_second(page, 0, 4.0), deltaX=0, deltaY=1)
    assert view(page) == before


def test_dragging_moves_the_view(page: Page, report: Path) -> None:
    page.open(report)
    page.click("#gantt-in")
    x, y = at_second(page, 0, 8.0)
    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    assert at_second(page, 0, 8.0)[0] == pytest.approx(x - 100, abs=1)


def test_the_timeline_can_be_navigated_and_zoomed_by_keys(page: Page, report: Path) -> None:
    page.open(report)
    page.evaluate("document.getElementById('gantt').focus()")
    page.key("ArrowDown")
    page.key("ArrowRight")
    spoken = page.evaluate("document.getElementById('gantt-spoken').textContent")
    assert spoken.startswith("generate, 2 s\nstep 1, group 0, sample 0\n") and "fast, from 10.000 s" in spoken
    page.key("ArrowDown")
    assert "slow, from 10.000 s" in page.evaluate("document.getElementById('gantt-spoken').textContent")
    page.key("+", text="+")
    assert view(page) == pytest.approx((4.75, 14.25))
    page.key("ArrowRight", modifiers=SHIFT)
    assert view(page) == pytest.approx((7.125, 16.625))
    page.key("0", text="0")
    assert view(page) == (0.0, 19.0)


def test_the_utilization_table_switches_between_steady_state_and_whole_run(page: Page, report: Path) -> None:
    page.open(report)
    row = "#utilization-table tbody tr:nth-child(2)"
    assert "40.0" in page.text(row) and "60.0" in page.text(row)
    page.click("#utilization-run")
    assert "42.1" in page.text(row)
    assert page.evaluate("document.getElementById('utilization-run').getAttribute('aria-pressed')") == "true"


def test_the_theme_can_be_chosen(page: Page, report: Path) -> None:
    page.open(report)
    for theme, paper in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 22, 27)")):
        page.click("#theme")
        assert page.text("#theme") == f"Theme: {theme}"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper


def test_a_long_run_opens_on_a_few_steps_and_can_be_seen_whole(page: Page, tmp_path: Path) -> None:
    trace = large_trace(generators=12, steps=60)
    page.open(write_report(write_run(tmp_path / "run", trace=trace)))
    first, last = view(page)
    assert page.errors == [] and 0 < first < last < first + 100
    page.click("#gantt-whole")
    assert view(page) == (0.0, pytest.approx(trace.end_ns / 1e9))
    legend = page.text("#gantt-legend")
    for words in ("generate, stale weights", "trainer helps generate", "idle: a bubble"):
        assert words in legend


def test_a_very_long_run_shows_its_last_steps(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = large_trace(generators=12, steps=60)
    monkeypatch.setattr(timeline, "MOST_SPANS", len(trace.spans) // 2)
    page.open(write_report(write_run(tmp_path / "run", trace=trace)))
    shown = timeline.shown_steps(trace)
    first_s = shown[min(shown)].start_ns / 1e9
    assert 20 < len(shown) < 40
    page.click("#gantt-whole")
    assert page.errors == [] and view(page) == (pytest.approx(first_s), pytest.approx(trace.end_ns / 1e9))
    page.click("#gantt-left")
    assert view(page)[0] == pytest.approx(first_s)
    assert f"The last {len(shown)} steps; trace.json has all." in page.text("#timeline-lead")
    assert page.evaluate("document.getElementById('gantt-step').options.length") == len(shown)


def test_a_run_whose_cards_do_both_shows_who_did_what(page: Page, tmp_path: Path) -> None:
    rows = [{**row, "assisted_share": 0.25} for row in metrics_rows()]
    folder = write_run(tmp_path / "run", trace=both_trace(), settings=both_recipe(), metrics=rows)
    page.open(write_report(folder), width=1280)
    assert page.errors == []
    assert "Assist on" in page.text("#techniques")
    assert "Assisted samples\n25\u202f%" in page.text("#headline")
    table = page.text("#who-table").replace("\u202f", " ").splitlines()
    assert table[2].split("\t") == ["gen", "2 (50 %)", "1 (25 %)", "4 s", "2 s", "500 ms", "2.5 s"]
    assert table[4].split("\t") == ["trainer", "2 (50 %)", "3 (75 %)", "4 s", "3 s", "1 s", "1 s"]
    page.click("#utilization-run")
    assert page.text("#who-table").splitlines()[-1].split("\t")[:3] == ["all", "8", "8"]
    left, top, _, _ = page.place_of("#gantt")
    for second, color in ((1.0, GENERATE), (4.3, TRAIN), (6.25, SEND)):
        x, y = at_second(page, 0, second)
        assert color_at(page, "#gantt", x - left, y - top) == color
    assert "send gradients" in page.text("#gantt-legend")


def test_a_run_that_has_just_started_shows_only_its_recipe(page: Page, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=[], evaluations=[], status="running")
    (folder / "spans.jsonl").unlink()
    with RunFolder.open(folder).locked():  # as its process does
        page.open(write_report(folder))
    assert page.errors == []
    assert "running when this page was written" in page.text("#status")
    hidden = [name for name in SECTIONS if page.evaluate(f"document.getElementById('{name}').hidden")]
    assert hidden == ["samples", "curves", "timeline", "utilization", "prediction"]
