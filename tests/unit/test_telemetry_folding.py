"""Folding lanes that look alike, and the ticks of the time axis."""

from __future__ import annotations

import pytest
from handmade_traces import SECOND, large_trace, span

from digenrl.telemetry.row_folding import FoldedRow, fold_lanes
from digenrl.telemetry.stacked_work import Layer, stacked_work
from digenrl.telemetry.styles import LEGEND_ORDER, fresh_style
from digenrl.telemetry.time_axis import seconds_text, ticks_ns
from digenrl.telemetry.trace import LaneInfo, Work
from digenrl.telemetry.utilization import lane_uses


def test_few_lanes_are_not_folded() -> None:
    lanes = large_trace(generators=9).lanes
    assert fold_lanes(lanes, most_rows=len(lanes), kept=2) == lanes


def test_many_lanes_are_folded_by_kind_and_every_lane_is_in_one_row() -> None:
    lanes = large_trace(generators=24).lanes
    rows = fold_lanes(lanes, most_rows=20, kept=4)
    in_rows = [lane for row in rows for lane in (row.lanes if isinstance(row, FoldedRow) else (row,))]
    assert in_rows == list(lanes)
    folds = [row for row in rows if isinstance(row, FoldedRow)]
    assert [(fold.lanes[0].name, len(fold.lanes)) for fold in folds] == [("a100-4", 12), ("l40s-4", 4)]


def test_folding_keeps_the_total_busy_time() -> None:
    trace = large_trace(generators=96)
    uses = lane_uses(trace)
    rows = fold_lanes(trace.lanes, most_rows=40, kept=8)
    total = sum(
        row.busy_share(uses) * len(row.lanes) if isinstance(row, FoldedRow) else uses[row.name].busy_share
        for row in rows
    )
    assert len(rows) <= 40
    assert total == pytest.approx(sum(use.busy_share for use in uses.values()))


def test_lanes_of_a_pool_come_together_even_when_they_are_listed_apart() -> None:
    lanes = (LaneInfo("a-0", "generator"), LaneInfo("trainer", "trainer"), LaneInfo("a-1", "generator"))
    rows = fold_lanes(lanes, most_rows=10, kept=4)
    assert rows == (lanes[0], lanes[2], lanes[1])


@pytest.mark.parametrize("until_ns", [1, 7, 999, 19 * SECOND, 58_200_000_000, 3600 * SECOND])
def test_ticks_are_round_start_at_zero_and_stay_on_the_axis(until_ns: int) -> None:
    ticks = ticks_ns(until_ns, most_ticks=10)
    assert ticks[0] == 0 and ticks[-1] <= until_ns and len(ticks) <= 11
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1
    assert str(step).rstrip("0") in ("1", "2", "5")
    assert until_ns - ticks[-1] < step


def test_seconds_are_written_exactly() -> None:
    assert [seconds_text(t) for t in (0, 500_000_000, 10 * SECOND, 100 * SECOND)] == ["0", "0.5", "10", "100"]


def test_every_style_has_its_own_letter_label_and_color() -> None:
    for attribute in ("letter", "label", "fill"):
        assert len({getattr(style, attribute) for style in LEGEND_ORDER}) == len(LEGEND_ORDER)


def test_every_kind_of_work_has_a_style_in_the_legend() -> None:
    assert all(fresh_style(work) in LEGEND_ORDER for work in Work)


def test_lanes_that_generate_and_train_are_stacked_by_their_work() -> None:
    spans = (
        span("a-0", Work.GENERATE, 0, 2, group=0, size=1),
        span("a-1", Work.GENERATE, 0, 3, group=0, size=1),
        span("a-0", Work.TRAIN, 2, 4, group=0, size=2),
        span("a-1", Work.PUBLISH, 0, 9),
    )
    generating = ((0, 2), (2 * SECOND, 1), (3 * SECOND, 0))
    working = ((0, 2), (2 * SECOND, 2), (3 * SECOND, 1), (4 * SECOND, 0))
    assert stacked_work(spans) == (Layer(Work.GENERATE, generating), Layer(Work.TRAIN, working))
    assert stacked_work(()) == ()
