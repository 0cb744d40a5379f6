"""`digenrl report`: writes page and trace and summarizes the run, whatever its status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from handmade_runs import both_recipe, evaluation_rows, metrics_rows, recipe, write_run
from handmade_traces import both_trace
from typer.testing import CliRunner

from digenrl.cli import app
from digenrl.commands.support import output
from digenrl.config.reading import ConfigError
from digenrl.run_folder.folder import FORMAT, RunFolder
from digenrl.telemetry.trace import LaneInfo, Trace


def report(*arguments: object) -> str:
    """The output of the command; its exceptions are raised here."""
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def numbers(run: Path) -> dict[str, Any]:
    content = json.loads(report(run, "--json"))
    assert isinstance(content, dict)
    return content


def row(printed: str, name: str) -> list[str]:
    """The words after the figure's name."""
    (line,) = [line for line in printed.splitlines() if line.startswith(f"{name} ")]
    return line.removeprefix(name).split()


def test_the_page_and_the_trace_are_written_and_their_paths_printed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    printed = report(run)
    for name in ("report.html", "trace.json"):
        assert (run / name).stat().st_size > 0
        assert f"wrote {run / name}" in printed


def test_the_table_summarizes_the_run(tmp_path: Path) -> None:
    printed = report(write_run(tmp_path / "run"))
    assert row(printed, "steps") == ["2", "of", "2", "finished"]
    assert row(printed, "reward")[:3] == ["0.2500", "->", "0.5000"]
    assert "0.2000 -> 0.8000  reward_mean" in printed
    assert "0.0000 -> 0.7500  reward/ocr.exact" in printed
    assert row(printed, "samples/s")[0] == "0.4"
    assert row(printed, "step") == ["10", "s", "predicted", "11", "s,", "off", "by", "10", "%"]


def test_a_narrow_terminal_cuts_no_name_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "width", 38)
    printed = report(write_run(tmp_path / "run"))
    assert "reward/ocr.exact" in "".join(printed.split())


def test_json_has_the_same_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    content = numbers(run)
    assert content["report"] == str(run / "report.html")
    assert content["trace"] == str(run / "trace.json")
    assert (content["steps_done"], content["steps_planned"], content["status"]) == (2, 2, "finished")
    assert content["reward"] == {"first": 0.25, "last": 0.5}
    assert content["held_out"]["reward_mean"] == {"first": 0.2, "last": 0.8}
    assert content["samples_per_s"] == pytest.approx(0.4)
    assert content["step_s"] == {"measured": 10.0, "predicted": 11.0, "median_error": pytest.approx(0.1)}
    # From the first commit, at 9 s, to the second, at 19 s.
    assert content["steady"]
    assert content["busy"] == pytest.approx({"fast": 0.4, "slow": 0.6, "reward-0": 0.2, "trainer": 0.45})


def test_the_trainers_helper_rows_are_not_listed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    about = json.loads((run / "run.json").read_text())
    about["lanes"].append({"name": "helper-0", "pool": "trainer", "device": "cpu"})
    (run / "run.json").write_text(json.dumps(about))
    assert "helper-0" not in numbers(run)["busy"]


def test_a_run_whose_cards_do_both_shows_who_generated_and_who_trained(tmp_path: Path) -> None:
    rows = [{**each, "assisted_share": 0.25} for each in metrics_rows()]
    run = write_run(tmp_path / "run", trace=both_trace(), settings=both_recipe(), metrics=rows)
    content = numbers(run)
    assert content["assisted_share"] == 0.25
    assert content["busy"] == pytest.approx({"gen": 6.5 / 9, "trainer": 8 / 9})
    assert content["lanes"] == {"gen": {"generated": 4, "trained": 2}, "trainer": {"generated": 4, "trained": 6}}
    printed = report(run)
    assert "25 % trained by generators" in printed
    assert "gen, generated 4, trained 2" in printed and "trainer, generated 4, trained 6" in printed


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
def test_a_run_is_reported_however_it_ended(tmp_path: Path, status: str) -> None:
    assert numbers(write_run(tmp_path / "run", status=status))["status"] == status


def test_a_live_run_is_running_and_one_whose_process_is_gone_was_interrupted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", status="running")
    with RunFolder.open(run).locked():
        assert numbers(run)["status"] == "running"
    assert numbers(run)["status"] == "interrupted"


def test_a_run_on_a_read_only_disk_is_reported_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = write_run(tmp_path / "run", status="running"), tmp_path / "elsewhere"
    files = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    monkeypatch.setattr(os, "access", lambda path, mode: path != run or mode != os.W_OK)
    with pytest.raises(ConfigError, match="--out"):
        report(run)
    content = json.loads(report(run, "--out", out, "--json"))
    assert (content["report"], content["trace"]) == (str(out / "report.html"), str(out / "trace.json"))
    assert content["status"] == "interrupted"
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "trace.json"]
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == files


def test_a_run_without_checkpoints_has_nothing_to_export(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(write_run(tmp_path / "run")), "--to", "peft"])
    assert str(result.exception).endswith("has no checkpoint yet")


def test_a_run_that_has_just_started_has_an_empty_summary(tmp_path: Path) -> None:
    nothing = Trace((LaneInfo("generator-0", "generator"), LaneInfo("trainer", "trainer")), (), 0)
    run = write_run(tmp_path / "run", trace=nothing, metrics=[], evaluations=[], status="running")
    for name in ("spans.jsonl", "metrics.jsonl", "evaluations.jsonl"):
        (run / name).unlink()
    content = numbers(run)
    assert content["steps_done"] == 0
    assert content["busy"] == content["held_out"] == {}
    for name in ("reward", "samples_per_s", "step_s"):
        assert content[name] is None
    assert row(report(run), "steps") == ["0", "of", "2", "interrupted"]


def test_before_the_second_evaluation_only_the_first_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", evaluations=evaluation_rows()[:1])
    assert numbers(run)["held_out"] == {"reward_mean": {"first": 0.2, "last": None}}
    assert "0.2000 -> ?" in report(run)


def test_without_a_prediction_the_measured_time_excludes_the_first_step(tmp_path: Path) -> None:
    rows = [{**each, "step_s": 1.0 + 99 * (each["step"] == 0)} for each in metrics_rows(4)]
    for each in rows:
        del each["predicted_step_s"]
    run = write_run(tmp_path / "run", metrics=rows, settings=recipe(steps=9))
    assert numbers(run)["step_s"] == {"measured": 1.0, "predicted": None, "median_error": None}
    assert row(report(run), "steps") == ["4", "of", "9", "finished"]


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"not a run"):
        report(tmp_path)
    run = write_run(tmp_path / "run")
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "format": FORMAT - 1}))
    with pytest.raises(ConfigError, match=rf"format {FORMAT - 1}, .*use digenrl 0.0.0"):
        report(run)


def test_a_damaged_run_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("nonsense\n{}\n")
    command = [sys.executable, "-c", "from digenrl.cli import main; main()", "report", str(run)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"digenrl: {run / 'metrics.jsonl'}, line 1")
