"""The terminal Gantt: the right characters in the right columns."""

from __future__ import annotations

import io

import pytest
from handmade_traces import SECOND, both_trace, helped_trace, large_trace, on_policy_trace, span
from rich.console import Console

from digenrl.telemetry.gantt_terminal import gantt_text
from digenrl.telemetry.trace import LaneInfo, Span, Trace, Work
from digenrl.telemetry.utilization import lane_uses

# With names of three letters, a chart of this width has a bar of 40 columns.
WIDTH_OF_40_COLUMNS = 3 + 1 + 40 + len(" 100 %")


def bars(trace: Trace, width: int) -> dict[str, str]:
    """Each lane's bar of characters, without its name and busy share."""
    longest_name = max(len(lane.name) for lane in trace.lanes)
    lines = gantt_text(trace, width).plain.splitlines()[: len(trace.lanes)]
    return {line[:longest_name].strip(): line[longest_name + 1 : -len(" 100 %")] for line in lines}


def one_lane(*spans: Span, end_s: int = 40) -> Trace:
    return Trace((LaneInfo("gen", "generator"),), spans, end_s * SECOND)


def test_every_column_shows_the_work_that_fills_it() -> None:
    trace = one_lane(
        span("gen", Work.GENERATE, 0, 5, group=3, size=2),
        span("gen", Work.GENERATE, 5, 10, group=12, size=2),
        span("gen", Work.GENERATE, 20, 25, step=1, group=0, size=2),
        span("gen", Work.GENERATE, 25, 26, step=1, group=1, size=2),
    )
    assert bars(trace, WIDTH_OF_40_COLUMNS) == {"gen": "3gggg12ggg..........0sssss.............."}


def test_a_block_covers_a_column_that_it_fills_at_least_half() -> None:
    trace = one_lane(span("gen", Work.SWITCH, 0, 5.5), span("gen", Work.SWITCH, 10.75, 15.25))
    assert bars(trace, WIDTH_OF_40_COLUMNS)["gen"][:18] == "xxxxxx....:xxxx:.."


def test_each_kind_of_work_has_its_own_letter() -> None:
    trace = one_lane(
        span("gen", Work.HELP, 0, 4, group=0, size=1),
        span("gen", Work.HELP, 4, 8, step=1, group=0, size=1),
        span("gen", Work.SCORE, 8, 12, group=0, size=1),
        span("gen", Work.TRAIN, 12, 16, group=0, size=1),
        span("gen", Work.SWITCH, 16, 20),
        span("gen", Work.COMMIT, 20, 24),
        span("gen", Work.PUBLISH, 24, 28),
        span("gen", Work.SEND, 28, 32),
    )
    assert bars(trace, WIDTH_OF_40_COLUMNS)["gen"] == "0hhh0HHH0rrr0TTTxxxxCCCCppppdddd........"


def test_a_column_with_little_work_is_marked_and_a_short_commit_is_never_lost() -> None:
    trace = one_lane(
        span("gen", Work.SCORE, 10, 10.25, size=1),
        span("gen", Work.TRAIN, 20, 22.75, size=1),
        span("gen", Work.COMMIT, 22.75, 22.875),
        span("gen", Work.COMMIT, 40, 40, step=1),
    )
    bar = bars(trace, WIDTH_OF_40_COLUMNS)["gen"]
    assert bar[10] == ":"
    assert bar[20:23] == "TTC"
    assert bar[39] == "C"
    assert bar.replace(".", "") == ":TTCC"


def test_publishing_during_training_does_not_hide_it() -> None:
    trace = one_lane(
        span("gen", Work.PUBLISH, 0, 6, group=-1), span("gen", Work.TRAIN, 2, 4, step=1, group=5, size=1)
    )
    assert bars(trace, WIDTH_OF_40_COLUMNS)["gen"][:8] == "pp5Tpp.."


def test_a_row_is_blank_while_its_card_works_in_another_row() -> None:
    rows = bars(helped_trace(), 8 + 1 + 28 + len(" 100 %"))
    assert rows["trainer"] == "x          x0TTT........1TTC"
    assert rows["helper-0"] == " 0hhhhhhhhh     ........    "


def test_a_lane_that_does_both_shows_both_and_the_trainers_row_its_commits() -> None:
    rows = bars(both_trace(), 8 + 1 + 34 + len(" 100 %"))
    assert rows["gen"] == "0ggg1ggg0TTTd.....0ggg1ggg0TTTd..."
    assert rows["trainer"] == "              CCpp              CC"
    assert rows["helper-0"] == "0hhh1hhh0T1TTT  ..0hhh1hhh0T1TTT  "
    legend = gantt_text(both_trace(), 80).plain
    assert "d send gradients" in legend and "switch" not in legend


def test_each_lane_shows_its_busy_share() -> None:
    lines = gantt_text(on_policy_trace(), 80).plain.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["fast", "slow", "reward-0", "trainer"]
    assert [line[-5:] for line in lines[:4]] == [" 42 %", " 63 %", " 21 %", " 47 %"]


def test_the_axis_marks_round_seconds_at_their_columns() -> None:
    lines = gantt_text(one_lane(span("gen", Work.TRAIN, 0, 40)), WIDTH_OF_40_COLUMNS).plain.splitlines()
    ruler, labels = lines[1], lines[2]
    for mark in (column for column, sign in enumerate(ruler) if sign == "+"):
        time_s = int(labels[mark:].split()[0])
        assert mark == min(4 + time_s, len(ruler) - 1)
    assert labels.endswith("40 s")


def test_many_lanes_are_folded_with_their_count_and_share() -> None:
    trace = large_trace(generators=24)
    lines = gantt_text(trace, 80).plain.splitlines()
    uses = lane_uses(trace)
    folded = sum(uses[f"a100-{i}"].busy_share for i in range(4, 16)) / 12
    assert f"...      12 more like these, {round(100 * folded)} % busy" in lines
    assert [line.split()[0] for line in lines[:6]] == [
        "a100-0",
        "a100-1",
        "a100-2",
        "a100-3",
        "...",
        "l40s-0",
    ]


@pytest.mark.parametrize("width", [60, 80, 132])
def test_no_line_is_wider_than_asked(width: int) -> None:
    for trace in (on_policy_trace(), helped_trace(), large_trace()):
        assert max(len(line) for line in gantt_text(trace, width).plain.splitlines()) <= width


def test_a_plain_terminal_shows_the_same_characters_as_a_colored_one() -> None:
    picture = gantt_text(large_trace(), 80)
    shown = io.StringIO()
    Console(file=shown, width=80, color_system=None).print(picture, end="")
    assert shown.getvalue() == picture.plain
    assert picture.plain.isascii()


def test_stale_and_helped_slices_have_their_own_colors() -> None:
    trace = one_lane(
        span("gen", Work.GENERATE, 0, 10, size=1),
        span("gen", Work.GENERATE, 10, 20, step=1, size=1),
        span("gen", Work.HELP, 20, 30, size=1),
    )
    picture = gantt_text(trace, WIDTH_OF_40_COLUMNS)
    console = Console()
    colors = [picture.get_style_at_offset(console, 4 + column).bgcolor for column in (5, 15, 25, 35)]
    assert len(set(colors)) == 4


def test_the_legend_lists_what_occurs_and_nothing_else() -> None:
    legend = " ".join(gantt_text(on_policy_trace(), 80).plain.splitlines()[6:])
    assert "g generate" in legend and "T train" in legend and ". idle" in legend
    assert "stale" not in legend and "helps" not in legend and "blank" not in legend


def test_long_names_keep_the_end_that_tells_them_apart() -> None:
    names = ("a-very-long-name-of-a-machine-in-a-rack-07", "a-very-long-name-of-a-machine-in-a-rack-08")
    trace = Trace(tuple(LaneInfo(name, "generator") for name in names), (), SECOND)
    first, second = gantt_text(trace, 80).plain.splitlines()[:2]
    assert first.split()[0].endswith("rack-07") and second.split()[0].endswith("rack-08")


def test_an_empty_run_says_that_nothing_ran() -> None:
    assert gantt_text(Trace((), (), 0), 80).plain == "nothing ran\n"
