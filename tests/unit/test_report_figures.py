"""The report's figures, for traces and metrics small enough to calculate by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from handmade_runs import both_recipe, evaluation_rows, metrics_rows, recipe, write_run
from handmade_traces import SECOND, both_trace, helped_trace, large_trace, on_policy_trace, span

from digenrl.config.recipes.recipe import Recipe
from digenrl.report import curves, headline
from digenrl.report.content import about, headline_of, prediction_of, techniques, utilization
from digenrl.report.grids import choose_evenly, grids
from digenrl.report.timeline import kinds_in, pack_intervals, shown_steps, timeline
from digenrl.run_folder.metric_lines import StepRecord
from digenrl.run_folder.reading import read_run
from digenrl.telemetry.lane_shares import TimeWindow, lane_shares, mean_busy, steady_window, step_windows
from digenrl.telemetry.lane_totals import LaneTotals, lane_totals
from digenrl.telemetry.trace import LaneInfo, Trace, Work
from digenrl.telemetry.utilization import lane_uses


def steps_of(*values: dict[str, float]) -> tuple[StepRecord, ...]:
    return tuple(StepRecord(number, each) for number, each in enumerate(values))


def test_a_step_lasts_from_commit_to_commit() -> None:
    windows = step_windows(on_policy_trace())
    assert windows == {0: TimeWindow(0, 9 * SECOND), 1: TimeWindow(9 * SECOND, 19 * SECOND)}


def test_the_steady_state_excludes_the_first_step() -> None:
    assert steady_window(on_policy_trace()) == TimeWindow(9 * SECOND, 19 * SECOND)
    assert steady_window(helped_trace()) is None


def test_shares_of_a_window_are_those_calculated_by_hand() -> None:
    shares = lane_shares(on_policy_trace(), TimeWindow(9 * SECOND, 19 * SECOND))
    assert shares["fast"].works == {Work.GENERATE: pytest.approx(0.4)}
    assert shares["slow"].works == {Work.GENERATE: pytest.approx(0.6)}
    assert shares["reward-0"].idle == pytest.approx(0.8)
    assert shares["trainer"].works == {Work.TRAIN: pytest.approx(0.4), Work.COMMIT: pytest.approx(0.05)}
    assert shares["trainer"].publishing == pytest.approx(0.1)


def test_a_card_that_works_in_another_row_is_neither_idle_nor_busy_with_its_own() -> None:
    shares = lane_shares(helped_trace(), TimeWindow(0, 14 * SECOND))
    assert shares["helper-0"].works == {Work.HELP: pytest.approx(5 / 14)}
    assert shares["helper-0"].elsewhere == pytest.approx(5 / 14)
    assert shares["trainer"].elsewhere == pytest.approx(5 / 14)
    assert shares["trainer"].idle == shares["helper-0"].idle == pytest.approx(4 / 14)


@pytest.mark.parametrize("trace", [on_policy_trace(), helped_trace(), both_trace(), large_trace()])
def test_shares_fill_the_time_and_agree_with_the_busy_shares_of_the_whole_run(trace: Trace) -> None:
    shares = lane_shares(trace, TimeWindow(0, trace.end_ns))
    for name, use in lane_uses(trace).items():
        assert shares[name].busy == pytest.approx(use.busy_share)
    for name in ("trainer", "reward-0"):
        if name in shares:
            parts = [*shares[name].works.values(), shares[name].elsewhere, shares[name].idle]
            assert sum(parts) == pytest.approx(1.0)


def test_a_lane_that_joined_late_is_not_idle_before() -> None:
    lanes = (LaneInfo("late", "generator", joined_ns=4 * SECOND), LaneInfo("gone", "generator", left_ns=SECOND))
    trace = Trace(lanes, (span("late", Work.GENERATE, 4, 7), span("gone", Work.GENERATE, 0, 1)), 10 * SECOND)
    assert lane_shares(trace, TimeWindow(0, 10 * SECOND))["late"].idle == pytest.approx(0.5)
    assert "gone" not in lane_shares(trace, TimeWindow(2 * SECOND, 10 * SECOND))


def test_helper_rows_do_not_count_twice_in_the_mean() -> None:
    trace = helped_trace()
    shares = lane_shares(trace, TimeWindow(0, trace.end_ns))
    assert mean_busy(trace, trace.lanes, shares) == pytest.approx((12 / 14 + 10 / 14) / 2)
    assert mean_busy(trace, (), shares) is None


def test_the_trainers_card_counts_once_in_the_mean_where_it_acts_alone() -> None:
    trace = both_trace()
    shares = lane_shares(trace, TimeWindow(0, trace.end_ns))
    assert mean_busy(trace, trace.lanes, shares) == pytest.approx((13 / 17 + 16 / 17) / 2)


def test_totals_say_who_generated_and_trained_what() -> None:
    totals = lane_totals(both_trace(), TimeWindow(0, 17 * SECOND))
    assert totals == (
        LaneTotals("gen", "generator", 4, 2, generating_s=8.0, training_s=4.0, other_s=1.0, idle_s=4.0),
        LaneTotals("trainer", "trainer", 4, 6, generating_s=8.0, training_s=6.0, other_s=2.0, idle_s=1.0),
    )


def test_totals_of_a_window_have_the_samples_whose_work_ended_there() -> None:
    # From the end of the generator's second slice to the end of its training.
    gen, trainer = lane_totals(both_trace(), TimeWindow(4 * SECOND, 6 * SECOND))
    assert (gen.generated, gen.trained, gen.training_s, gen.idle_s) == (0, 1, 2.0, 0.0)
    assert (trainer.trained, trainer.training_s) == (1, 2.0)


def test_a_trainer_that_helps_is_one_row_with_what_its_helper_lanes_generated() -> None:
    gen, trainer = lane_totals(helped_trace(), TimeWindow(0, 14 * SECOND))
    assert (gen.name, gen.generated, gen.trained, gen.idle_s) == ("gen", 3, 0, 2.0)
    expected = LaneTotals("trainer", "trainer", 1, 4, generating_s=5.0, training_s=4.0, other_s=1.0, idle_s=4.0)
    assert trainer == expected


def test_several_cards_of_a_trainer_that_act_alone_have_their_own_totals() -> None:
    lanes = (LaneInfo("trainer", "trainer"), LaneInfo("helper-0", "trainer"), LaneInfo("helper-1", "trainer"))
    spans = (
        span("helper-0", Work.TRAIN, 0, 3, group=0, size=1),
        span("helper-1", Work.HELP, 0, 2, group=1, size=2),
        span("trainer", Work.COMMIT, 3, 4),
    )
    totals = lane_totals(Trace(lanes, spans, 4 * SECOND, shares_work=True), TimeWindow(0, 4 * SECOND))
    assert [(each.name, each.generated, each.trained, each.idle_s) for each in totals] == [
        ("helper-0", 0, 1, 0.0),
        ("helper-1", 2, 0, 1.0),
    ]


def test_the_reward_of_a_long_run_is_averaged_at_its_ends() -> None:
    few = steps_of({"reward_mean": 0.1}, {"reward_mean": 0.2}, {"kl": 1.0})
    assert headline.reward_change(few) == headline.Change(0.1, 0.2)
    many = steps_of(*({"reward_mean": float(number)} for number in range(40)))
    assert headline.reward_change(many) == headline.Change(0.5, 38.5)
    assert headline.reward_change(()) is None


def test_samples_per_second_exclude_the_first_step() -> None:
    slow, quick = {"samples": 4, "step_s": 100.0}, {"samples": 4, "step_s": 2.0}
    assert headline.samples_per_second(steps_of(slow, quick, quick)) == 2.0
    assert headline.samples_per_second(steps_of(slow)) == 0.04
    assert headline.samples_per_second(steps_of({"samples": 4})) is None


def test_shares_are_of_samples_not_of_steps() -> None:
    steps = steps_of({"samples": 30, "stale_share": 0.0}, {"samples": 10, "stale_share": 1.0}, {"samples": 5})
    assert headline.share_of_samples(steps, "stale_share") == 0.25
    assert headline.share_of_samples(steps, "helped_share") is None


def test_every_step_is_compared_with_the_newest_prediction() -> None:
    steps = steps_of(
        {"step_s": 50.0},
        {"step_s": 10.0, "predicted_step_s": 11.0},
        {"step_s": 20.0},
        {"step_s": 8.0, "predicted_step_s": 10.0},
        {"reward_mean": 1.0},
    )
    found = headline.prediction_accuracy(steps)
    assert found is not None
    assert (found.steps, found.predicted_s, found.measured_s) == ((1, 2, 3), (11.0, 11.0, 10.0), (10.0, 20.0, 8.0))
    assert found.errors == pytest.approx((0.1, -0.45, 0.25))
    assert found.median_error == pytest.approx(0.25)
    assert headline.prediction_accuracy(steps[:1]) is None


def test_the_headline_of_the_handmade_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    shown = headline_of(run)
    assert shown["reward"] == {"first": 0.25, "last": 0.5}
    assert shown["held_out"] == {
        "reward_mean": {"first": 0.2, "last": 0.8},
        "reward/ocr.exact": {"first": 0.0, "last": 0.75},
    }
    assert shown["samples_per_s"] == 0.4
    assert (shown["stale_share"], shown["helped_share"]) == (0.125, 0.0)
    assert shown["busy"] == pytest.approx((0.4 + 0.6 + 0.2 + 0.45) / 4)
    assert shown["busy_of"] == "Lanes"
    assert shown["prediction_error"] == pytest.approx(0.1)
    assert prediction_of(run).keys() == {"steps", "predicted_s", "measured_s", "errors", "median_error"}


def test_evaluations_with_other_settings_are_not_compared(tmp_path: Path) -> None:
    rows = evaluation_rows()
    changed = [rows[0], *({**rows[1], "step": step, "settings": "new"} for step in (1, 2))]
    changed[-1]["reward_mean"] = 0.9
    run = read_run(write_run(tmp_path / "run", evaluations=changed))
    assert headline_of(run)["held_out"]["reward_mean"] == {"first": 0.8, "last": 0.9}
    assert [each.y for each in curves.held_out_charts(run)[0].series] == [(0.2, None, None), (None, 0.8, 0.9)]
    assert [each["step"] for each in grids(run)["shown"]] == [1, 2] and grids(run)["others"] == 1
    alone = headline_of(read_run(write_run(tmp_path / "other", evaluations=changed[:2])))
    assert alone["held_out"] == {}


def test_the_cost_of_a_judge_is_not_in_the_headline(tmp_path: Path) -> None:
    cost = {"reward/judge/prompt_tokens": 100.0, "reward/judge/cached": 0.0, "reward/judge/detail": 1.0}
    run = read_run(write_run(tmp_path / "run", evaluations=[row | cost for row in evaluation_rows()]))
    assert list(headline_of(run)["held_out"]) == ["reward_mean", "reward/ocr.exact", "reward/judge/detail"]


def test_where_all_lanes_share_a_card_the_headline_is_the_cards_and_no_mean_over_its_rows(tmp_path: Path) -> None:
    lanes = (LaneInfo("device-0", "generator"), LaneInfo("reward-0", "reward"), LaneInfo("trainer", "trainer"))
    spans = (
        span("device-0", Work.GENERATE, 0, 6),
        span("reward-0", Work.SCORE, 5, 6),
        span("trainer", Work.TRAIN, 8, 10),
    )
    settings = recipe(mode="colocated", techniques={"tcss": 0.0})
    trace = Trace(lanes, spans, 10 * SECOND, shared_cards=True)
    shown = headline_of(read_run(write_run(tmp_path / "run", settings=settings, trace=trace)))
    assert (shown["busy_of"], shown["busy"]) == ("Card", pytest.approx(0.8))
    assert shown["stale_share"] is shown["helped_share"] is None, "nothing overlaps"
    assert [each["name"] for each in techniques(settings)] == ["TSP"]


def test_a_run_whose_cards_do_both_says_so(tmp_path: Path) -> None:
    rows = [{**row, "assisted_share": 0.5 * row["step"]} for row in metrics_rows()]
    run = read_run(write_run(tmp_path / "run", settings=both_recipe(), trace=both_trace(), metrics=rows))
    shown = headline_of(run)
    assert shown["assisted_share"] == 0.25
    assert shown["busy"] == pytest.approx((6.5 / 9 + 8 / 9) / 2), "the trainer's card counts once"
    assert shown["busy_by_pool"]["trainer"] == pytest.approx(8 / 9)
    lanes = dict(about(run))["Lanes"]
    assert lanes == "local: 1 generator (cpu), 1 trainer (cpu); generators also train, the trainer also generates"
    (chart,) = [chart for chart in curves.health_charts(run) if chart.title == "Shares of samples"]
    assert [(series.name, series.y) for series in chart.series][-1] == ("assisted", (0.0, 0.5))
    steady = utilization(run)["steady"]["totals"]
    assert [(each["name"], each["generated"], each["trained"]) for each in steady] == [
        ("gen", 2, 1),
        ("trainer", 2, 3),
    ]
    counted = {lane["name"]: lane["counted"] for lane in timeline(run)["lanes"]}
    assert counted == {"gen": True, "trainer": False, "helper-0": True}


def test_a_run_that_has_just_started_has_no_headline(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=[], evaluations=[])
    (folder / "spans.jsonl").unlink()
    shown = headline_of(read_run(folder))
    assert [shown[name] for name in ("reward", "samples_per_s", "busy", "stale_share")] == [None] * 4
    assert shown["held_out"] == {}


def test_the_most_important_settings_are_listed(tmp_path: Path) -> None:
    words = dict(about(read_run(write_run(tmp_path / "run"))))
    assert words["Batch"] == "2 prompts × 2 samples, slice auto"
    assert words["Trained"] == "LoRA of rank 8, learning rate 0.0003"
    assert words["Steps"] == "2 of 2 optimizer steps, seed 0"
    assert words["Lanes"] == "local: 2 generator (cpu), 1 reward (cpu), 1 trainer (cpu)"


def test_several_rewards_show_their_weights_and_a_control_is_marked(tmp_path: Path) -> None:
    rewards = [{"name": "ocr", "weight": 0.7}, {"name": "jpeg_compressibility", "weight": 0.3}]
    settings = recipe(rewards=rewards, reward_sum="normalized", shuffled_rewards=True)
    words = dict(about(read_run(write_run(tmp_path / "run", settings=settings))))
    formula, *notes = words["Rewards"].split(", ")
    assert formula == "0.7 × ocr + 0.3 × jpeg_compressibility"
    assert notes == ["each normalized within groups", "shuffled within groups (control)"]


def test_techniques_show_what_was_off() -> None:
    states = {each["name"]: (each["on"], each["setting"]) for each in techniques(recipe())}
    assert states == {
        "GAP": (True, ""),
        "TSP": (True, ""),
        "TAG": (False, ""),
        "Assist": (False, ""),
        "TCSS": (True, "25%"),
    }


@pytest.mark.parametrize(
    ("settings", "tag", "assist"),
    [
        (recipe(techniques={"assist": "none"}), False, False),
        (recipe(techniques={"assist": "trainer"}), True, False),
        (both_recipe(), True, True),
    ],
)
def test_techniques_show_who_helps(settings: Recipe, tag: bool, assist: bool) -> None:
    states = {each["name"]: each["on"] for each in techniques(settings)}
    assert (states["TAG"], states["Assist"]) == (tag, assist)


def test_every_metric_is_shown_in_one_chart(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    (reward,) = curves.reward_charts(run)
    assert (reward.x, reward.series[0].y, reward.series[0].spread) == ((0, 1), (0.25, 0.5), (0.1, 0.1))
    assert curves.part_charts(run) == ()  # equals the reward
    assert [chart.title for chart in curves.held_out_charts(run)] == ["Held-out reward", "Held-out ocr.exact"]
    health = [chart.title for chart in curves.health_charts(run)]
    assert health == ["Samples per second", "Gradient norm", "Shares of samples"]
    assert [chart.title for chart in curves.other_charts(run)] == ["my_own_metric"]


def test_parts_that_equal_the_reward_have_no_chart_and_no_tile(tmp_path: Path) -> None:
    first, second = metrics_rows()
    steps = [
        {**row, "reward/ocr.similarity": row["reward_mean"] + 1e-12, "reward/ocr": 0.1} for row in (first, second)
    ]
    evaluations = [{**row, "reward/ocr.similarity": row["reward_mean"]} for row in evaluation_rows()]
    run = read_run(write_run(tmp_path / "run", metrics=steps, evaluations=evaluations))
    assert [chart.title for chart in curves.part_charts(run)] == ["ocr"]
    assert [chart.title for chart in curves.held_out_charts(run)] == ["Held-out reward", "Held-out ocr.exact"]
    assert set(headline.held_out_changes(run)) == {"reward_mean", "reward/ocr.exact"}


def test_a_metric_that_a_step_lacks_is_a_gap(tmp_path: Path) -> None:
    first, second = metrics_rows()
    run = read_run(write_run(tmp_path / "run", metrics=[first, {**second, "kl": 0.5}]))
    (chart,) = [chart for chart in curves.health_charts(run) if chart.title == "KL to the reference"]
    assert chart.series[0].y == (None, 0.5)


def unpacked(packed: dict[str, Any], lane: str) -> list[tuple[int, ...]]:
    """(start, end, kind, step, group, first, size, version) of a lane's spans, in microseconds."""
    flat = next(each["spans"] for each in packed["lanes"] if each["name"] == lane)
    spans, at_us = [], 0
    for place in range(0, len(flat), 8):
        at_us += flat[place]
        spans.append((at_us, at_us + flat[place + 1], *flat[place + 2 : place + 8]))
    return spans


@pytest.mark.parametrize("trace", [on_policy_trace(), helped_trace(), both_trace(), large_trace()])
def test_packed_spans_hold_what_the_trace_holds(tmp_path: Path, trace: Trace) -> None:
    packed = timeline(read_run(write_run(tmp_path / "run", trace=trace)))
    kinds = [(kind.work, kind.style.stale) for kind in kinds_in(trace)]
    for lane in trace.lanes:
        expected = {
            (
                each.start_ns // 1000,
                each.end_ns // 1000,
                kinds.index((each.work, each.stale)),
                *(each.step, each.group, each.first, each.size, each.version),
            )
            for each in trace.spans
            if each.lane == lane.name
        }
        assert set(unpacked(packed, lane.name)) == expected


def test_the_page_of_a_very_long_run_holds_its_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = large_trace()
    whole, most = step_windows(trace), len(trace.spans) // 2
    monkeypatch.setattr("digenrl.report.timeline.MOST_SPANS", most)
    packed = timeline(read_run(write_run(tmp_path / "run", trace=trace)))
    first = packed["steps"][0][0]
    assert min(whole) < first and [step for step, *_ in packed["steps"]] == list(range(first, max(whole) + 1))
    assert packed["start"] == whole[first].start_ns // 1000
    late = [span for span in trace.spans if span.end_ns > whole[first].start_ns]
    assert sum(len(unpacked(packed, lane.name)) for lane in trace.lanes) == len(late)
    assert len(late) <= most + 3 * len(trace.lanes), "and what was running when the first of them began"
    monkeypatch.setattr("digenrl.report.timeline.MOST_SPANS", 1)
    assert list(shown_steps(trace)) == [max(whole)]


def test_packed_neighbors_stay_adjacent() -> None:
    assert pack_intervals(((0, 1_500), (1_500, 9_999), (20_000, 21_000))) == [0, 1, 1, 8, 19, 1]


def test_stale_helped_and_concurrent_work_is_marked(tmp_path: Path) -> None:
    packed = timeline(read_run(write_run(tmp_path / "run", trace=large_trace())))
    marks = {(kind["work"], kind["stale"]): (kind["helped"], kind["concurrent"]) for kind in packed["kinds"]}
    assert marks["generate", False] == marks["generate", True] == (False, False)
    assert marks["help", False] == (True, False)
    assert marks["publish", False] == (False, True)


def test_lane_shares_are_given_for_the_run_and_the_steady_state(tmp_path: Path) -> None:
    shown = utilization(read_run(write_run(tmp_path / "run")))
    assert (shown["run"]["seconds"], shown["steady"]["seconds"]) == (19.0, 10.0)
    assert shown["run"]["lanes"]["fast"]["works"] == {"generate": pytest.approx(8 / 19)}
    assert utilization(read_run(write_run(tmp_path / "one", trace=helped_trace())))["steady"] is None


def test_long_runs_show_some_of_their_grids_and_always_the_first_and_last() -> None:
    assert choose_evenly([1] * 5, most=24, most_bytes=100) == (0, 1, 2, 3, 4)
    assert choose_evenly([1] * 100, most=3, most_bytes=100) == (0, 50, 99)
    assert choose_evenly([10] * 9, most=9, most_bytes=50) == (0, 2, 4, 6, 8)
    assert choose_evenly([1000, 1, 1000], most=9, most_bytes=50) == (0, 2)
    assert choose_evenly([1000], most=9, most_bytes=50) == (0,)
    assert choose_evenly([], most=9, most_bytes=50) == ()


def test_a_grid_is_embedded_as_an_image(tmp_path: Path) -> None:
    packed = grids(read_run(write_run(tmp_path / "run")))
    assert packed["written"] == len(packed["shown"]) == 2
    assert packed["shown"][0]["image"].startswith("data:image/png;base64,iVBOR")
    assert [entry["step"] for entry in packed["shown"]] == [0, 2]
