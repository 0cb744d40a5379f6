"""Run folders with random damage: they resume from a whole checkpoint, or one line says why not."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from handmade_runs import metrics_rows, write_lines, write_run

from digenrl.checksums import file_checksum
from digenrl.commands.report import report_run, summary_table
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import fingerprint
from digenrl.run_folder.folder import RunFolder, RunLines
from digenrl.runs.resuming import find_resume_point, kept_positions, repair_logs
from digenrl.training.checkpoint.format import WHOLE, CheckpointContent

DAMAGED_FOLDERS = int(os.environ.get("DIGENRL_DAMAGED_FOLDERS", "40"))
ODD_VALUES = (None, True, "text", [1], {"a": 1}, 0, -1, 1.5, -1.5e308, 1.5e308, 10**400, -(10**400), float("nan"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with two checkpoints and all its files."""
    folder = RunFolder.open(write_run(tmp_path_factory.mktemp("damaged") / "whole"))
    folder.checkpoints.mkdir(exist_ok=True)
    write_lines(folder.metrics, metrics_rows(2))
    lines = RunLines(folder)
    for step in (1, 2):
        lines.journal.append({"at_ns": step})
        path = folder.checkpoint(step)
        path.mkdir()
        files = {}
        for name in ("weights.safetensors", "optimizer.safetensors"):
            (path / name).write_bytes(random.Random(step).randbytes(300))
            files[name] = {"bytes": 300, "checksum": file_checksum(path / name)}
        facts = {
            "at_ns": step,
            "jobs_issued": step,
            "positions": lines.positions(),
            "fingerprint": fingerprint(folder.recipe),
        }
        CheckpointContent(WHOLE, step, {}, facts, files).write(path)
    lines.close()
    return folder


def damage(folder: Path, dice: random.Random) -> None:
    """Cuts, changes, replaces or removes a file or folder."""
    target = dice.choice([path for path in sorted(folder.rglob("*")) if path.name != ".lock"])
    kind = dice.choice(["remove", "cut", "flip", "garbage", "rename", "folder", "append", *["value"] * 7])
    if target.is_dir():
        shutil.rmtree(target) if kind in ("remove", "cut") else target.rename(
            target.with_name(f"elsewhere-{dice.random()}")
        )
        return
    content = bytearray(target.read_bytes())
    if kind in ("remove", "folder"):
        target.unlink()
        if kind == "folder":
            target.mkdir()
    elif kind == "rename":
        target.rename(target.with_name(".replaced-" + target.name))
    elif kind == "cut":
        target.write_bytes(content[: dice.randrange(len(content) + 1)])
    elif kind == "append":
        target.write_bytes(content + dice.randbytes(50))
    elif kind == "value" and target.suffix in (".json", ".jsonl", ".yaml"):
        replace_value(target, dice)
    elif kind == "garbage" or not content:
        target.write_bytes(dice.randbytes(dice.randrange(200)))
    else:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        target.write_bytes(content)


def replace_value(path: Path, dice: random.Random) -> None:
    """Gives one value of a file another type, or makes it negative or very large; damaged content stays."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    if not lines:
        return
    which = dice.randrange(len(lines))
    try:
        content = yaml.safe_load(lines[which]) if path.suffix == ".yaml" else json.loads(lines[which])
    except (ValueError, yaml.YAMLError):
        return
    places = list(places_in(content))
    if places:
        inside, key = dice.choice(places)
        inside[key] = dice.choice(ODD_VALUES)
    lines[which] = yaml.safe_dump(content) if path.suffix == ".yaml" else json.dumps(content)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def places_in(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every mapping or list in the content, with each of its keys."""
    if isinstance(content, dict | list):
        for key in list(content) if isinstance(content, dict) else range(len(content)):
            yield content, key
            yield from places_in(content[key])


def test_a_damaged_run_resumes_from_a_whole_checkpoint_or_is_refused_in_one_line(
    whole: RunFolder, tmp_path: Path
) -> None:
    resumed: Counter[int] = Counter()
    for seed in range(DAMAGED_FOLDERS):
        dice, path = random.Random(seed), tmp_path / "run"
        shutil.copytree(whole.path, path)
        for _ in range(dice.randint(1, 3)):
            damage(path, dice)
        for attempt in (report_run, resume):
            try:
                found = attempt(path)
                if isinstance(found, int):
                    resumed[found] += 1
                else:
                    summary_table(found.summary)
            except ConfigError as error:
                assert "\n" not in str(error), (seed, str(error))
            except Exception as error:
                raise AssertionError(f"damage of seed {seed}") from error
        shutil.rmtree(path)
    assert resumed[2] > resumed[1] > 0, "the newest one, unless it is damaged"


def resume(path: Path) -> int:
    """The step from which the run resumes, -1 if it has no checkpoint; its files are as they were saved."""
    folder = RunFolder.open(path)
    point = find_resume_point(folder)
    if point is None:
        return -1
    point = repair_logs(folder, point, lambda line: None)
    lines = RunLines(folder)
    lines.truncate(kept_positions(folder, point.position))
    lines.close()
    step = point.position.step
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert (point.checkpoint / name).read_bytes() == random.Random(step).randbytes(300)
    return step
