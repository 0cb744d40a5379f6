"""Reading a run's folder: whole, young, cut short by a crash, damaged, or none at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handmade_runs import PROMPTS, evaluation_rows, metrics_rows, recipe, span_row, write_lines, write_run
from handmade_traces import SECOND, helped_trace, on_policy_trace, span

from digenrl.config.reading import ConfigError
from digenrl.telemetry.report.reading import read_run
from digenrl.telemetry.trace import LaneInfo, Trace, Work


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert (run.name, run.status, run.recipe) == ("handmade", "finished", recipe())
    assert run.trace == on_policy_trace()
    assert [step.values["reward_mean"] for step in run.steps] == [0.25, 0.5]
    assert [evaluation.values["reward/ocr.exact"] for evaluation in run.evaluations] == [0.0, 0.75]
    assert run.devices["fast"] == "cpu"


def test_a_grid_has_its_prompts_and_rewards_row_by_row(tmp_path: Path) -> None:
    grid = read_run(write_run(tmp_path / "run")).evaluations[1].grid
    assert grid is not None and (grid.columns, grid.gap) == (2, 2)
    assert tuple(cell.prompt for cell in grid.cells) == PROMPTS
    assert [cell.reward for cell in grid.cells] == [1.0, 0.75, 0.75, 0.7]
    assert grid.cells[0].parts == {"ocr.exact": 1.0}


def test_a_run_that_has_just_begun_is_empty(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", status="running")
    for name in ("spans.jsonl", "metrics.jsonl", "evaluations.jsonl"):
        (folder / name).unlink()
    run = read_run(folder)
    assert (run.trace.spans, run.trace.end_ns, run.steps, run.evaluations) == ((), 0, (), ())


def test_a_publication_that_outlives_the_run_does_not_lengthen_it(tmp_path: Path) -> None:
    spans = (span("trainer", Work.COMMIT, 1, 2), span("trainer", Work.PUBLISH, 2, 5))
    trace = Trace((LaneInfo("trainer", "trainer"),), spans, 2 * SECOND)
    assert read_run(write_run(tmp_path / "run", trace=trace)).trace.end_ns == 2 * SECOND


def test_spans_are_put_into_the_order_of_their_start(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", trace=helped_trace())
    write_lines(folder / "spans.jsonl", map(span_row, reversed(helped_trace().spans)))
    starts = [each.start_ns for each in read_run(folder).trace.spans]
    assert starts == sorted(starts)


def test_evaluating_and_saving_are_read_like_other_work(tmp_path: Path) -> None:
    spans = (span("trainer", Work.EVALUATE, 0, 1), span("trainer", Work.SAVE, 1, 2))
    trace = Trace((LaneInfo("trainer", "trainer"),), spans, 2 * SECOND)
    assert read_run(write_run(tmp_path / "run", trace=trace)).trace.spans == spans


def test_generators_and_trainer_of_a_colocated_run_share_their_cards(tmp_path: Path) -> None:
    settings = recipe(mode="colocated", techniques={"tcss": 0.0})
    assert read_run(write_run(tmp_path / "run", settings=settings)).trace.shared_cards
    assert not read_run(write_run(tmp_path / "other")).trace.shared_cards


@pytest.mark.parametrize("kept", [1, 20, -2])
def test_a_last_line_that_a_crash_cut_short_is_left_out(tmp_path: Path, kept: int) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:kept]}")
    assert [step.step for step in read_run(folder).steps] == [0]


def test_a_last_line_that_lacks_only_its_newline_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    assert len(read_run(folder).steps) == 2


@pytest.mark.parametrize("name", ["spans.jsonl", "metrics.jsonl", "evaluations.jsonl"])
@pytest.mark.parametrize("damage", ['{"step": 0, "rewa', "[1, 2]", "\x00\x00"])
def test_a_damaged_line_is_named_by_its_file_and_number(tmp_path: Path, name: str, damage: str) -> None:
    folder = write_run(tmp_path / "run")
    lines = (folder / name).read_text().splitlines()
    (folder / name).write_text("\n".join([lines[0], damage, *lines[1:]]) + "\n")
    with pytest.raises(ConfigError, match=rf"{name}, line 2: not a JSON object"):
        read_run(folder)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"lane": "nowhere"}, "unknown lane 'nowhere'; run.json has: fast, reward-0, slow, trainer"),
        ({"work": "sleep"}, "no span of work: work:"),
        ({"start_ns": None}, "no span of work: start_ns:"),
        ({"end_ns": -1}, "the span ends at -1 ns, before it starts"),
    ],
)
def test_a_span_that_cannot_be_is_named(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    folder = write_run(tmp_path / "run")
    rows = [span_row(each) for each in on_policy_trace().spans]
    write_lines(folder / "spans.jsonl", [*rows[:2], {**rows[2], **change}])
    with pytest.raises(ConfigError, match=re.escape(f"spans.jsonl, line 3: {complaint}")):
        read_run(folder)


def test_what_a_resumed_run_did_again_counts_once_as_it_was_the_last_time(tmp_path: Path) -> None:
    first, second = metrics_rows()
    again = {**second, "reward_mean": 0.9}
    metrics = read_run(write_run(tmp_path / "run", metrics=[first, second, again])).steps
    assert [(step.step, step.values["reward_mean"]) for step in metrics] == [(0, 0.25), (1, 0.9)]


def test_numbers_that_are_not_finite_are_absent_and_words_are_damage(tmp_path: Path) -> None:
    first, second = metrics_rows()
    folder = write_run(tmp_path / "run", metrics=[{**first, "kl": float("nan"), "ratio_max": float("inf")}])
    assert not {"kl", "ratio_max"} & read_run(folder).steps[0].values.keys()
    write_lines(folder / "metrics.jsonl", [first, {**second, "kl": "small"}])
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2: 'kl' is 'small', expected a number"):
        read_run(folder)


def test_a_line_without_a_step_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=[{"reward_mean": 0.5}])
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 1: 'step' is None"):
        read_run(folder)


def test_an_evaluation_whose_picture_is_gone_keeps_its_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "samples" / "step_000000.png").unlink()
    (folder / "samples" / "step_000002.json").unlink()
    before, after = read_run(folder).evaluations
    assert before.grid is None and before.values["reward_mean"] == 0.2
    assert after.grid is not None and after.grid.cells == ()


def test_a_picture_outside_of_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"private")
    row = {**evaluation_rows()[0], "grid": "../secret.png"}
    folder = write_run(tmp_path / "run", evaluations=[row])
    with pytest.raises(ConfigError, match=r"evaluations.jsonl, line 1: the grid '../secret.png' lies outside"):
        read_run(folder)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / "run.json").unlink(), "not the folder of a run: it has no run.json"),
        (lambda folder: (folder / "config.yaml").unlink(), "not the folder of a run: it has no config.yaml"),
        (
            lambda folder: change_json(folder / "run.json", format=2),
            "run.json: format is 2; this digenrl reads format 1",
        ),
        (lambda folder: change_json(folder / "run.json", status="odd"), "run.json: status"),
        (lambda folder: (folder / "config.yaml").write_text("steps: none"), "config.yaml: "),
        (
            lambda folder: change_json(folder / "samples" / "step_000000.json", columns=0),
            "step_000000.json: columns",
        ),
    ],
)
def test_a_folder_that_is_no_run_is_refused_in_one_line(
    tmp_path: Path, spoil: Callable[[Path], None], complaint: str
) -> None:
    folder = write_run(tmp_path / "run")
    spoil(folder)
    with pytest.raises(ConfigError, match=re.escape(complaint)) as raised:
        read_run(folder)
    assert "\n" not in str(raised.value)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder; name the folder of a run"):
        read_run(tmp_path / "nowhere")
