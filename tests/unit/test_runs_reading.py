"""Reading a run's folder: complete, just started, cut by a crash, damaged, or not a run at all."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handmade_runs import PROMPTS, evaluation_rows, metrics_rows, recipe, span_row, write_lines, write_run
from handmade_traces import SECOND, helped_trace, on_policy_trace, span

from digenrl.config.reading import ConfigError
from digenrl.run_folder.folder import FORMAT
from digenrl.run_folder.metric_lines import read_steps
from digenrl.run_folder.reading import read_run
from digenrl.telemetry.trace import LaneInfo, Trace, Work


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert (run.info.name, run.info.status, run.recipe) == ("handmade", "finished", recipe())
    assert run.trace == on_policy_trace()
    assert [step.values["reward_mean"] for step in run.steps] == [0.25, 0.5]
    assert [evaluation.values["reward/ocr.exact"] for evaluation in run.evaluations] == [0.0, 0.75]
    assert run.info.lanes[0].device == "cpu"


def test_a_grid_has_its_prompts_and_rewards_row_by_row(tmp_path: Path) -> None:
    captions = read_run(write_run(tmp_path / "run")).grids[2].captions
    assert captions is not None and (captions.columns, captions.gap) == (2, 2)
    assert tuple(cell.prompt for cell in captions.items) == PROMPTS
    assert [cell.reward for cell in captions.items] == [1.0, 0.75, 0.75, 0.7]
    assert captions.items[0].known_parts() == {"ocr.exact": 1.0}


def test_a_run_that_has_just_started_is_empty(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", status="running")
    for name in ("spans.jsonl", "metrics.jsonl", "evaluations.jsonl"):
        (folder / name).unlink()
    run = read_run(folder)
    assert (run.trace.spans, run.trace.end_ns, run.steps, run.evaluations) == ((), 0, (), ())


def test_a_publication_that_outlasts_the_run_does_not_extend_it(tmp_path: Path) -> None:
    spans = (span("trainer", Work.COMMIT, 1, 2), span("trainer", Work.PUBLISH, 2, 5))
    trace = Trace((LaneInfo("trainer", "trainer"),), spans, 2 * SECOND)
    assert read_run(write_run(tmp_path / "run", trace=trace)).trace.end_ns == 2 * SECOND


def test_spans_are_sorted_by_start(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kept", [1, 20, -2, None])
def test_a_last_line_without_its_newline_is_ignored(tmp_path: Path, kept: int | None) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:kept]}")
    assert [step.step for step in read_run(folder).steps] == [0]


@pytest.mark.parametrize("name", ["spans.jsonl", "metrics.jsonl", "evaluations.jsonl"])
@pytest.mark.parametrize("damage", ['{"step": 0, "rewa', "[1, 2]", "\x00\x00"])
def test_a_damaged_line_is_named_by_its_file_and_number(tmp_path: Path, name: str, damage: str) -> None:
    folder = write_run(tmp_path / "run")
    lines = (folder / name).read_text().splitlines()
    (folder / name).write_text("\n".join([lines[0], damage, *lines[1:]]) + "\n")
    with pytest.raises(ConfigError, match=rf"{name}, line 2: "):
        read_run(folder)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"lane": "nowhere"}, "unknown lane 'nowhere'"),
        ({"work": "sleep"}, "not a span: work:"),
        ({"start_ns": None}, "not a span: start_ns:"),
        ({"start_ns": 9, "end_ns": 5}, "the span ends at 5 ns"),
        ({"end_ns": -1}, "not a span: end_ns:"),
        ({"size": 10**12}, "not a span: size:"),
    ],
)
def test_an_impossible_span_is_an_error_with_its_line(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    folder = write_run(tmp_path / "run")
    rows = [span_row(each) for each in on_policy_trace().spans]
    write_lines(folder / "spans.jsonl", [*rows[:2], {**rows[2], **change}])
    with pytest.raises(ConfigError, match=re.escape(f"spans.jsonl, line 3: {complaint}")):
        read_run(folder)


@pytest.mark.parametrize("order", [[*range(200)], [*range(200), *range(150, 200)]], ids=["once", "resumed"])
def test_steps_are_read_one_at_a_time(order: list[int], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": step, **{f"busy/lane-{lane}": nth / 256 for lane in range(300)}} for nth, step in enumerate(order)
    ]
    write_lines(path, lines)
    read_first = [(record.step, record.values["busy/lane-7"]) for record in read_steps(path)]
    assert read_first == [
        (step, max(nth for nth, each in enumerate(order) if each == step) / 256) for step in range(200)
    ]
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_steps(path)) == 200
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 4
    finally:
        tracemalloc.stop()


def test_a_step_that_a_resumed_run_repeated_counts_once_with_its_later_values(tmp_path: Path) -> None:
    first, second = metrics_rows()
    again = {**second, "reward_mean": 0.9}
    metrics = read_run(write_run(tmp_path / "run", metrics=[first, second, again])).steps
    assert [(step.step, step.values["reward_mean"]) for step in metrics] == [(0, 0.25), (1, 0.9)]


def test_values_that_are_not_finite_are_omitted_and_text_is_an_error(tmp_path: Path) -> None:
    first, second = metrics_rows()
    folder = write_run(tmp_path / "run", metrics=[{**first, "kl": float("nan"), "ratio_max": float("inf")}])
    assert not {"kl", "ratio_max"} & read_run(folder).steps[0].values.keys()
    write_lines(folder / "metrics.jsonl", [first, {**second, "kl": "small"}])
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2: 'kl'"):
        read_run(folder)


def test_a_line_without_a_step_is_an_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=[{"reward_mean": 0.5}])
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 1: 'step'"):
        read_run(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"step": None},
        {"step": -1},
        {"count": "three"},
        {"at_s": 10**400},
        {"reward_mean": [0.5]},
        {"grid": ["a.png"]},
        {"grid": "\0.png"},
        {"grid": "long" * 100},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_evaluation_with_an_impossible_value_is_an_error_with_its_line(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    first, second = evaluation_rows()
    folder = write_run(tmp_path / "run", evaluations=[first, {**second, **change}])
    with pytest.raises(ConfigError, match=rf"evaluations.jsonl, line 2: '{next(iter(change))}'") as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)


def test_an_evaluation_whose_grid_is_missing_keeps_its_values(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "samples" / "step_000000.png").unlink()
    (folder / "samples" / "step_000002.json").unlink()
    run = read_run(folder)
    assert [each.values["reward_mean"] for each in run.evaluations] == [0.2, 0.8]
    assert list(run.grids) == [2] and run.grids[2].captions is None


def test_a_grid_outside_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"private")
    row = {**evaluation_rows()[0], "grid": "../secret.png"}
    folder = write_run(tmp_path / "run", evaluations=[row])
    with pytest.raises(ConfigError, match=r"evaluations.jsonl, line 1: .*secret.png"):
        read_run(folder)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: change_json(folder / "run.json", format=FORMAT - 1), "run.json: format"),
        (lambda folder: change_json(folder / "run.json", status="odd"), "run.json: status"),
        (lambda folder: (folder / "config.yaml").write_text("steps: none"), "config.yaml: "),
        (
            lambda folder: change_json(folder / "samples" / "step_000000.json", columns=0),
            "step_000000.json: columns",
        ),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(
    tmp_path: Path, spoil: Callable[[Path], None], complaint: str
) -> None:
    folder = write_run(tmp_path / "run")
    spoil(folder)
    with pytest.raises(ConfigError, match=re.escape(complaint)) as raised:
        read_run(folder)
    assert "\n" not in str(raised.value)
