"""A run's folder: created once, opened again, held by one process."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from handmade_runs import recipe

from digenrl.config.reading import ConfigError
from digenrl.run_folder.folder import LaneEntry, RunFolder, RunLines, Status, numbered_path
from digenrl.run_folder.lines import read_lines

STARTED = datetime(2025, 3, 1, 12, 30, tzinfo=UTC)


def _create(path: Path) -> RunFolder:
    return RunFolder.create(path, recipe(), STARTED)


def test_a_created_run_is_opened_with_the_same_recipe_and_description(tmp_path: Path) -> None:
    created = _create(tmp_path / "runs" / "demo")
    lanes = (LaneEntry(name="gpu-0", pool="generator", device="cuda:0"),)
    created.describe(lanes=lanes, opening={"slice_s": {"gpu-0": 1.5}})
    opened = RunFolder.open(created.path)
    assert opened.recipe == created.recipe == recipe()
    assert opened.info == created.info
    assert opened.info.lanes == lanes
    assert opened.info.started == STARTED


def test_the_files_say_what_the_contract_of_a_run_says(tmp_path: Path) -> None:
    folder = _create(tmp_path / "demo")
    assert yaml.safe_load(folder.config.read_text()) == recipe().model_dump(mode="json")
    content = json.loads(folder.run.read_text())
    assert content["format"] == 1
    assert content["name"] == "handmade"
    assert datetime.fromisoformat(content["started"]) == STARTED
    assert content["status"] == "running"
    assert folder.grid(7).name == "step_000007.png"
    assert folder.checkpoint(12) == tmp_path / "demo" / "checkpoints" / "step_000012"


def test_an_empty_folder_may_be_used_and_any_other_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    _create(tmp_path / "empty")
    with pytest.raises(ConfigError, match="holds a run already; resume it"):
        _create(tmp_path / "empty")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(ConfigError, match=r"photos: is not empty, it has cat.jpg; name a new folder"):
        _create(tmp_path / "photos")
    assert [entry.name for entry in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: is a file"):
        _create(tmp_path / "file")


def test_what_is_no_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"holds no run: config.yaml and run.json are missing"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
def test_a_run_with_one_file_missing_or_damaged_names_the_file(tmp_path: Path, name: str) -> None:
    folder = _create(tmp_path / "demo")
    (folder.path / name).write_text("{")
    with pytest.raises(ConfigError, match=f"{name}: not valid YAML or JSON"):
        RunFolder.open(folder.path)
    (folder.path / name).unlink()
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        RunFolder.open(folder.path)


def test_a_wrong_key_of_a_recipe_on_disk_is_told_as_in_any_recipe(tmp_path: Path) -> None:
    folder = _create(tmp_path / "demo")
    folder.config.write_text(folder.config.read_text() + "stepps: 3\n")
    with pytest.raises(ConfigError, match=r"config.yaml: stepps: unknown key; did you mean 'steps'"):
        RunFolder.open(folder.path)


def test_a_run_of_another_format_asks_for_the_version_that_wrote_it(tmp_path: Path) -> None:
    folder = _create(tmp_path / "demo")
    content = json.loads(folder.run.read_text())
    folder.run.write_text(json.dumps({**content, "format": 2, "new_key": 1}))
    with pytest.raises(ConfigError, match=r"format 2, this digenrl .* reads 1; use the version that wrote it"):
        RunFolder.open(folder.path)


def test_status_changes_are_on_disk_at_once_and_leave_no_partial_file(tmp_path: Path) -> None:
    folder = _create(tmp_path / "demo")
    for status in Status:
        folder.set_status(status)
        assert RunFolder.open(folder.path).info.status is status
    assert not list(folder.path.glob("*.partial"))


def test_two_cannot_train_in_one_folder_and_the_message_names_the_process(tmp_path: Path) -> None:
    first, second = _create(tmp_path / "demo"), RunFolder.open(tmp_path / "demo")
    with first.locked():
        assert second.is_locked()
        with (
            pytest.raises(ConfigError, match=r"demo: process \d+ is training in this folder; wait for it"),
            second.locked(),
        ):
            pass
    assert not second.is_locked()
    with second.locked():
        pass


def test_a_killed_process_leaves_its_folder_free_and_its_run_interrupted(tmp_path: Path) -> None:
    folder = _create(tmp_path / "demo")
    hold = (
        "import sys, pathlib\n"
        "from digenrl.run_folder.folder import RunFolder\n"
        "with RunFolder.open(pathlib.Path(sys.argv[1])).locked():\n"
        "    print('locked', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == "locked\n"
    assert folder.standing() is Status.RUNNING
    with pytest.raises(ConfigError, match=f"process {holder.pid} is training"), folder.locked():
        pass
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert folder.standing() is Status.INTERRUPTED
    folder.set_status(Status.FINISHED)
    assert folder.standing() is Status.FINISHED


def test_runs_of_one_name_are_numbered_on(tmp_path: Path) -> None:
    names = [numbered_path(tmp_path / "runs", "demo").name for _ in range(3)]
    assert names == ["demo-1", "demo-2", "demo-3"]
    (tmp_path / "runs" / "demo-2").rmdir()
    (tmp_path / "runs" / "demo-2-11").mkdir()
    (tmp_path / "runs" / "other-40").mkdir()
    assert numbered_path(tmp_path / "runs", "demo").name == "demo-4"
    assert _create(numbered_path(tmp_path / "runs", "demo")).path.name == "demo-5"


def test_all_growing_files_go_back_to_the_checkpoint(tmp_path: Path) -> None:
    folder = _create(tmp_path / "demo")
    lines = RunLines(folder)
    growing = (lines.journal, lines.spans, lines.metrics, lines.evaluations)
    for each in growing:
        each.append({"before": each.path.name})
    checkpoint = json.loads(json.dumps(lines.positions()))
    for each in growing:
        each.append({"after": each.path.name})
    lines.close()

    again = RunLines(RunFolder.open(folder.path))
    again.cut_back(checkpoint)
    again.close()
    for path in (folder.journal, folder.spans, folder.metrics, folder.evaluations):
        assert list(read_lines(path)) == [{"before": path.name}]


def test_a_run_without_a_checkpoint_begins_again_with_empty_files(tmp_path: Path) -> None:
    lines = RunLines(_create(tmp_path / "demo"))
    lines.metrics.append({"step": 0})
    lines.cut_to_nothing()
    assert set(lines.positions().values()) == {0}


def test_positions_of_other_files_are_an_error_and_cut_nothing(tmp_path: Path) -> None:
    lines = RunLines(_create(tmp_path / "demo"))
    lines.metrics.append({"step": 0})
    with pytest.raises(ConfigError, match="expected those of journal, spans, metrics, evaluations"):
        lines.cut_back({"metrics": 0})
    assert lines.positions()["metrics"] > 0
