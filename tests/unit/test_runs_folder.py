"""A run's folder: created once, opened again, locked by one process."""

from __future__ import annotations

import errno
import gzip
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from handmade_runs import recipe
from rich.console import Console

from digenrl.commands.train import start_run
from digenrl.config.reading import ConfigError
from digenrl.run_folder.folder import FORMAT, LaneEntry, RunFolder, RunLines, Status, numbered_path
from digenrl.run_folder.lines import located_lines
from digenrl.run_folder.log_files import KEPT_PARTS, LONGEST_BYTES, rotate_logs
from digenrl.run_folder.segments import in_background

STARTED = datetime(2025, 3, 1, 12, 30, tzinfo=UTC)


def _create(path: Path) -> RunFolder:
    return RunFolder.create(path, recipe(), STARTED)


def test_a_created_run_is_opened_with_the_same_recipe_and_description(tmp_path: Path) -> None:
    created = _create(tmp_path / "runs" / "demo")
    lanes = (LaneEntry(name="gpu-0", pool="generator", device="cuda:0"),)
    created.update_info(lanes=lanes, initial_state={"slice_s": {"gpu-0": 1.5}})
    opened = RunFolder.open(created.path)
    assert opened.recipe == created.recipe == recipe()
    assert opened.info == created.info
    assert opened.info.lanes == lanes
    assert opened.info.started == STARTED


def test_config_and_run_json_have_the_documented_content(tmp_path: Path) -> None:
    folder = _create(tmp_path / "demo")
    assert yaml.safe_load(folder.config.read_text()) == recipe().model_dump(mode="json")
    content = json.loads(folder.run.read_text())
    assert content["format"] == FORMAT
    assert content["name"] == "handmade"
    assert datetime.fromisoformat(content["started"]) == STARTED
    assert content["status"] == "running"
    assert folder.grid(7).name == "step_000007.png"
    assert folder.checkpoint(12) == tmp_path / "demo" / "checkpoints" / "step_000012"


def test_a_run_is_created_only_in_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    _create(tmp_path / "empty")
    with pytest.raises(ConfigError, match="contains a run; resume it"):
        _create(tmp_path / "empty")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(ConfigError, match=r"photos: is not empty.*cat.jpg"):
        _create(tmp_path / "photos")
    assert [entry.name for entry in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: is a file"):
        _create(tmp_path / "file")


def test_a_folder_that_is_not_a_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder.open(Path(__file__))
    with pytest.raises(ConfigError, match=r"not a run.*run.json and config.yaml missing"):
        RunFolder.open(tmp_path)
    _create(tmp_path / "demo-1")
    with pytest.raises(ConfigError, match=r"not a run.*such as .*demo-1"):
        RunFolder.open(tmp_path)


def test_a_run_in_place_of_a_recipe_or_a_new_folder_is_refused_before_the_recipe_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(_create(tmp_path / "demo").path)
    monkeypatch.setattr("digenrl.commands.train.check_recipe", None)
    with pytest.raises(ConfigError, match="train --resume"):
        start_run(folder, [], None, Console(), as_json=False)
    with pytest.raises(ConfigError, match="already contains a run"):
        start_run("demo", [], Path(folder), Console(), as_json=False)


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
def test_a_run_with_one_file_missing_or_damaged_names_the_file(tmp_path: Path, name: str) -> None:
    folder = _create(tmp_path / "demo")
    (folder.path / name).write_text("{")
    with pytest.raises(ConfigError, match=f"{name}: not valid YAML or JSON"):
        RunFolder.open(folder.path)
    (folder.path / name).unlink()
    with pytest.raises(ConfigError, match=f"{name} missing"):
        RunFolder.open(folder.path)


def test_an_unknown_key_in_the_recipe_on_disk_is_an_error_as_in_any_recipe(tmp_path: Path) -> None:
    folder = _create(tmp_path / "demo")
    folder.config.write_text(folder.config.read_text() + "stepps: 3\n")
    with pytest.raises(ConfigError, match=r"config.yaml: stepps: .*'steps'"):
        RunFolder.open(folder.path)


def test_a_run_of_another_format_asks_for_the_version_that_wrote_it(tmp_path: Path) -> None:
    folder = _create(tmp_path / "demo")
    content = json.loads(folder.run.read_text())
    folder.config.write_text("a_key_that_recipes_no_longer_have: 1")
    for found in (FORMAT - 1, FORMAT + 1, None):
        folder.run.write_text(json.dumps({**content, "format": found, "digenrl": "0.0.7", "other_key": 1}))
        with pytest.raises(
            ConfigError, match=rf"format {found}, .* reads format {FORMAT}: use digenrl 0.0.7"
        ) as raised:
            RunFolder.open(folder.path)
        assert "\n" not in str(raised.value)


def test_a_status_change_is_written_immediately_and_leaves_no_partial_file(tmp_path: Path) -> None:
    folder = _create(tmp_path / "demo")
    for status in Status:
        folder.set_status(status)
        assert RunFolder.open(folder.path).info.status is status
    assert not list(folder.path.glob("*.partial"))


def test_run_json_and_config_are_on_disk_before_they_replace_the_former_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _create(tmp_path / "demo")
    synced: list[Path] = []
    before = folder.run.read_text()

    def sync(path: Path) -> None:
        synced.append(path)
        if path.name == "run.json.partial":
            assert folder.run.read_text() == before and '"finished"' in path.read_text()

    monkeypatch.setattr("digenrl.telemetry.writing.sync", sync)
    folder.set_status(Status.FINISHED)
    folder.write_recipe(folder.recipe)
    written = [folder.path / name for name in ("run.json.partial", "config.yaml.partial")]
    assert synced == [written[0], folder.path, written[1], folder.path]


def test_two_processes_cannot_train_in_one_folder_and_the_error_names_the_holder(tmp_path: Path) -> None:
    first, second = _create(tmp_path / "demo"), RunFolder.open(tmp_path / "demo")
    with first.locked():
        assert second.is_locked()
        with (
            pytest.raises(ConfigError, match=r"demo: process \d+ is training"),
            second.locked(),
        ):
            pass
    assert not second.is_locked()
    with second.locked():
        pass


def test_a_killed_process_releases_the_lock_and_its_run_counts_as_interrupted(tmp_path: Path) -> None:
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
    assert folder.actual_status() is Status.RUNNING
    with pytest.raises(ConfigError, match=f"process {holder.pid} is training"), folder.locked():
        pass
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert folder.actual_status() is Status.INTERRUPTED
    folder.set_status(Status.FINISHED)
    assert folder.actual_status() is Status.FINISHED


def test_runs_of_one_name_are_numbered(tmp_path: Path) -> None:
    names = [numbered_path(tmp_path / "runs", "demo").name for _ in range(3)]
    assert names == ["demo-1", "demo-2", "demo-3"]
    (tmp_path / "runs" / "demo-2").rmdir()
    (tmp_path / "runs" / "demo-2-11").mkdir()
    (tmp_path / "runs" / "other-40").mkdir()
    assert numbered_path(tmp_path / "runs", "demo").name == "demo-4"
    assert _create(numbered_path(tmp_path / "runs", "demo")).path.name == "demo-5"


def test_all_line_files_are_truncated_to_the_checkpoint(tmp_path: Path) -> None:
    folder = _create(tmp_path / "demo")
    lines = RunLines(folder)
    files = (lines.journal, lines.spans, lines.metrics, lines.evaluations)
    for each in files:
        each.append({"before": each.path.name})
    checkpoint = json.loads(json.dumps(lines.positions()))
    for each in files:
        each.append({"after": each.path.name})
    lines.close()

    again = RunLines(RunFolder.open(folder.path))
    again.truncate(checkpoint)
    again.close()
    for path in (folder.journal, folder.spans, folder.metrics, folder.evaluations):
        assert [line.content for line in located_lines(path)] == [{"before": path.name}]


def test_clearing_empties_all_line_files(tmp_path: Path) -> None:
    lines = RunLines(_create(tmp_path / "demo"))
    lines.metrics.append({"step": 0})
    lines.clear()
    assert set(lines.positions().values()) == {0}


def test_positions_of_other_files_are_an_error_and_truncate_nothing(tmp_path: Path) -> None:
    lines = RunLines(_create(tmp_path / "demo"))
    lines.metrics.append({"step": 0})
    with pytest.raises(ConfigError, match="journal, spans, metrics, evaluations"):
        lines.truncate({"metrics": 0})
    assert lines.positions()["metrics"] > 0


def test_long_logs_are_compressed_and_only_the_newest_parts_are_kept(tmp_path: Path) -> None:
    log, short = tmp_path / "trainer.log", tmp_path / "encoder.log"
    short.write_bytes(b"short")
    with log.open("ab") as writer:  # as a worker has it open
        for part in range(KEPT_PARTS + 2):
            writer.write(b"%d" % part * 100)
            writer.flush()
            rotate_logs(tmp_path, limit=100)
        writer.write(b"end")
    assert log.read_bytes() == b"end" and short.read_bytes() == b"short"
    parts = [gzip.decompress((tmp_path / f"trainer.log.{n}.gz").read_bytes()) for n in range(1, KEPT_PARTS + 1)]
    assert parts == [b"%d" % part * 100 for part in range(KEPT_PARTS + 1, 1, -1)]
    assert len(list(tmp_path.iterdir())) == KEPT_PARTS + 2


def test_a_log_that_cannot_be_compressed_stays_as_it_is_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("digenrl.run_folder.segments.shutil.copyfileobj", full)
    log = tmp_path / "trainer.log"
    log.write_bytes(b"x" * LONGEST_BYTES)
    in_background(rotate_logs, tmp_path).join()
    assert list(tmp_path.iterdir()) == [log] and log.stat().st_size == LONGEST_BYTES
    assert "No space left on device" in caplog.text
