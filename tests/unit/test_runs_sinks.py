"""The sinks: files, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from handmade_runs import recipe
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from watched_runs import initial_state_of, watch

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.recipe import LoggingSettings
from digenrl.metrics import sinks
from digenrl.metrics.sinks import FileSink, check_logging, open_sinks
from digenrl.metrics.tensorboard_sink import TensorBoardSink
from digenrl.run_folder.folder import RunFolder, RunLines
from digenrl.run_folder.metric_lines import EvaluationRecord
from digenrl.run_folder.reading import read_run
from digenrl.run_folder.spans import SpanWriter
from digenrl.telemetry.recorder import Recorder

STARTED = datetime(2025, 3, 1, 12, 30, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "demo-1", recipe(), STARTED)


def _wall_clock() -> float:
    return 1_700_000_000.5


def _evaluation(folder: RunFolder, steps_done: int, reward: float) -> EvaluationRecord:
    Image.new("RGB", (12, 8), (255, 0, 0)).save(folder.grid(steps_done))
    grid = folder.grid(steps_done).relative_to(folder.path).as_posix()
    return EvaluationRecord(steps_done, 2.5, 200, {"reward_mean": reward, "reward/ocr.exact": 0.25}, grid)


def _step(step: int, **numbers: float) -> dict[str, float]:
    return {"step": step, "at_s": 2.0 * step + 2, "step_s": 2.0, "version": step + 1, **numbers}


def _curves(folder: RunFolder) -> EventAccumulator:
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    return events


def _points(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in events.Scalars(tag)]


def test_the_files_have_a_line_per_step_and_per_evaluation(folder: RunFolder) -> None:
    lines = RunLines(folder)
    sink = FileSink(lines.metrics, lines.evaluations)
    sink.step(_step(0, reward_mean=0.5, kl=float("nan"), ratio_max=float("inf")))
    sink.evaluation(_evaluation(folder, 0, 0.5))
    assert json.loads(folder.metrics.read_text()) == _step(0, reward_mean=0.5) | {"kl": None, "ratio_max": None}
    assert json.loads(folder.evaluations.read_text()) == {
        "step": 0,
        "at_s": 2.5,
        "count": 200,
        "reward_mean": 0.5,
        "reward/ocr.exact": 0.25,
        "grid": "samples/step_000000.png",
    }


def test_tensorboard_reads_back_curves_and_grids(folder: RunFolder) -> None:
    sink = TensorBoardSink(folder, 0, _wall_clock)
    sink.evaluation(_evaluation(folder, 0, 0.5))
    for step in range(3):
        sink.step(_step(step, reward_mean=step / 4, **{"reward/ocr": 0.5, "busy/gpu-0": 0.75}))
    events = _curves(folder)  # while the sink is still open
    assert _points(events, "train/reward_mean") == [(1, 0.0), (2, 0.25), (3, 0.5)]
    assert _points(events, "busy/gpu-0") == [(1, 0.75), (2, 0.75), (3, 0.75)]
    assert _points(events, "evaluation/reward_mean") == [(0, 0.5)]
    assert _points(events, "evaluation/reward/ocr.exact") == [(0, 0.25)]
    (image,) = events.Images("evaluation/samples")
    assert (image.width, image.height) == (12, 8)
    assert image.encoded_image_string == folder.grid(0).read_bytes()
    assert events.Scalars("train/step_s")[0].wall_time == _wall_clock()
    sink.close()
    sink.close()


def test_a_resumed_run_overrides_what_tensorboard_has_of_later_steps(folder: RunFolder) -> None:
    first = TensorBoardSink(folder, 0, _wall_clock)
    for step in range(5):
        first.step(_step(step, reward_mean=0.25))
    first.close()
    second = TensorBoardSink(folder, 2, _wall_clock)
    second.step(_step(2, reward_mean=0.75))
    second.close()
    assert _points(_curves(folder), "train/reward_mean") == [(1, 0.25), (2, 0.25), (3, 0.75)]


def test_the_recipe_decides_which_sinks_are_opened(folder: RunFolder, tmp_path: Path) -> None:
    lines = RunLines(folder)
    opened = open_sinks(folder, lines, 0, _wall_clock)
    assert [type(sink).__name__ for sink in opened] == ["FileSink", "TensorBoardSink"]
    quiet = RunFolder.create(tmp_path / "quiet", recipe(logging={"tensorboard": False}), STARTED)
    assert [type(sink).__name__ for sink in open_sinks(quiet, RunLines(quiet), 0, _wall_clock)] == ["FileSink"]
    assert not quiet.tensorboard.exists()


FAKE_WANDB = """
calls = []
class Error(Exception):
    pass
def Image(path):
    return ("image", path)
class Run:
    def define_metric(self, name, step_metric):
        calls.append(("define", name, step_metric))
    def log(self, content):
        calls.append(("log", content))
    def finish(self):
        calls.append(("finish",))
def init(**settings):
    if settings["project"] == "refused":
        raise Error("no API key")
    calls.append(("init", settings))
    return Run()
"""


@pytest.fixture
def wandb_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls of a stand-in for the package."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    yield wandb.calls
    sys.modules.pop("wandb", None)


def test_wandb_gets_one_run_with_every_step_and_evaluation(wandb_calls: list[Any], tmp_path: Path) -> None:
    logged = recipe(logging={"tensorboard": False, "wandb": "my-project"})
    folder = RunFolder.create(tmp_path / "demo-1", logged, STARTED)
    _, sink = open_sinks(folder, RunLines(folder), 0, _wall_clock)
    sink.step(_step(0, reward_mean=0.5))
    evaluation = _evaluation(folder, 1, 0.5)
    sink.evaluation(evaluation)
    sink.close()
    (_, settings), axis, *logs, end = wandb_calls
    assert axis == ("define", "*", "version"), "wandb drops what is logged with an earlier step of its own"
    assert settings["project"] == "my-project"
    assert (settings["name"], settings["id"], settings["resume"]) == ("demo-1", "demo-1-20250301-123000", "allow")
    assert settings["config"]["seed"] == 0
    assert logs[0] == ("log", _step(0, reward_mean=0.5)) and logs[0][1]["version"] == 1
    assert logs[1][1]["version"] == 1
    assert logs[1][1]["evaluation/samples"] == ("image", str(folder.grid(1)))
    assert end == ("finish",)


def test_the_id_of_a_wandb_run_has_no_characters_that_wandb_refuses(
    wandb_calls: list[Any], tmp_path: Path
) -> None:
    logged = recipe(logging={"tensorboard": False, "wandb": "my-project"})
    folder = RunFolder.create(tmp_path / "bob's lr=1e-4,seed:2", logged, STARTED)
    open_sinks(folder, RunLines(folder), 0, _wall_clock)
    settings = wandb_calls[0][1]
    assert settings["name"] == folder.path.name
    assert settings["id"] == "bob-s lr=1e-4-seed-2-20250301-123000"


def test_what_wandb_refuses_is_one_line(wandb_calls: list[Any], tmp_path: Path) -> None:
    logged = recipe(logging={"tensorboard": False, "wandb": "refused"})
    folder = RunFolder.create(tmp_path / "demo-1", logged, STARTED)
    with pytest.raises(ConfigError, match=r"^logging.wandb: no API key; log in with `wandb login`"):
        open_sinks(folder, RunLines(folder), 0, _wall_clock)


def test_a_missing_package_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logging.wandb: mine .*digenrl\[wandb\]"):
        check_logging(LoggingSettings(tensorboard=False, wandb="mine"))
    with pytest.raises(ConfigError, match=r"logging.tensorboard: true"):
        check_logging(LoggingSettings())
    check_logging(LoggingSettings(tensorboard=False))


def test_a_run_folder_is_read_back_as_it_was_written(folder: RunFolder) -> None:
    opening, lines = initial_state_of(), RunLines(folder)
    whole = Recorder(opening)
    rows = whole.trace().lanes
    folder.update_info(lanes=[{"name": row.name, "pool": row.pool, "device": "cpu"} for row in rows])
    sink = FileSink(lines.metrics, lines.evaluations)
    sink.evaluation(_evaluation(folder, 0, 0.5))
    watch(opening, [sink], on_span=SpanWriter(lines.spans, lambda span: None).add, after=(whole,))
    lines.close()

    read = read_run(folder.path)
    assert set(read.trace.spans) == set(whole.trace().spans)
    assert len(read.trace.spans) == len(whole.trace().spans)
    assert read.trace.lanes == rows
    assert [each.step for each in read.steps] == [0, 1, 2, 3]
    assert read.grids[0].image == folder.grid(0)


@pytest.mark.slow
def test_watching_a_run_loads_neither_torch_nor_tensorflow() -> None:
    modules = (
        "console.live_view",
        "run_folder.journal",
        "report.page",
        "metrics.tensorboard_sink",
        "metrics.wandb_sink",
    )
    imports = ", ".join(f"digenrl.{name}" for name in modules)
    program = f"import sys, {imports}\nprint([name for name in ('torch', 'tensorflow') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
