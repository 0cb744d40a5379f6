"""`digenrl profile`: measures this device; `simulate` and `plan` read the profile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from digenrl.cli import app
from digenrl.commands.profile import profile_recipe, scored_prompt, slice_sizes, small_batch
from digenrl.config.profiles import Profile, read_profile
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.planning.facts.recipe_workload import profiled_work
from digenrl.records import Calibrate, Calibrated, PromptRow
from digenrl.worker.blueprint import read_blueprint
from digenrl.worker.calibration import StageCalibration

SMALL = [
    *("batch.samples_per_prompt=4", "batch.slice=auto", "algorithm.options.updates_per_batch=2"),
    *("sample.denoising_steps=6", "lanes.generators=[cpu]", "lanes.threads=1"),
]


def digenrl(*words: object) -> Result:
    """Calls a command in this process, which has torch loaded."""
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Profile]]:
    """The profile of the demo on this machine's CPU, as written and printed."""
    path = tmp_path_factory.mktemp("profiles") / "cpu.yaml"
    before = torch.get_num_threads()
    result = digenrl("profile", "demo", *SMALL, "--out", path, "--json")
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == before
    written = read_profile(str(path))
    assert Profile.model_validate(json.loads(result.stdout)) == written
    yield path, written


def test_everything_that_a_run_costs_is_measured(profile: tuple[Path, Profile]) -> None:
    _, measured = profile
    assert measured.work == profiled_work(read_recipe("demo", SMALL))
    assert list(measured.slices) == [1, 2, 4]
    assert measured.training is not None and measured.training.pack_size == 36
    for name in ("commit", "publish", "switch_in", "switch_out", "score"):
        assert getattr(measured, f"{name}_seconds") is not None, name
    assert measured.commit_seconds and measured.publish_seconds and measured.score_seconds
    assert measured.published_bytes and measured.published_bytes > measured.weights_bytes > 5_000_000
    assert measured.device.fp32_tflops and measured.device.bf16_tflops is None
    assert measured.remarks == ()


def test_simulate_and_plan_read_it(profile: tuple[Path, Profile], tmp_path: Path) -> None:
    path, measured = profile
    predicted = json.loads(digenrl("simulate", "--profile", path, "--json").stdout)
    assert predicted["samples_per_step"] == 32 and predicted["step_seconds"] > 0
    spec = tmp_path / "spec.json"
    bare = {"steps": 2, "prompts": 8, "samples_per_prompt": 4, "slice": "auto", "generators": [{"count": 2}]}
    spec.write_text(json.dumps({**bare, "profile": str(path)}))
    assert json.loads(digenrl("simulate", spec, "--json").stdout)["makespan"] > 0
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"pools": [{"profile": str(path), "nodes": 2, "per_node": 1}]}))
    planned = digenrl("plan", "demo", *SMALL, "--cluster", cluster, "--out", tmp_path / "plan.yaml", "--json")
    assert planned.exit_code == 0 and measured.device.name in planned.stdout
    with pytest.raises(ConfigError, match="height = 32"):
        digenrl("plan", "demo", *SMALL, "sample.height=64", "--cluster", cluster, "--out", tmp_path / "other.yaml")


def test_an_existing_file_is_not_overwritten(profile: tuple[Path, Profile]) -> None:
    with pytest.raises(ConfigError, match=r"cpu.yaml: .*--force"):
        digenrl("profile", "demo", "--out", profile[0])
    with pytest.raises(ConfigError, match="SPEC"):
        digenrl("simulate")


def test_what_fails_is_omitted_with_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out at slices of 2, and the reward server is not running."""
    calibrate = StageCalibration.calibrate

    def until_memory_runs_out(calibration: StageCalibration, job: Calibrate) -> Calibrated:
        if job.task == "generate" and max(job.sizes) > 1:
            raise torch.OutOfMemoryError("no room for two")
        return calibrate(calibration, job)

    monkeypatch.setattr(StageCalibration, "calibrate", until_memory_runs_out)
    monkeypatch.setenv("DIGENRL_REWARD_TOKEN", "a-token-of-more-than-16-letters")
    nowhere = "rewards=[{name: http, url: 'http://127.0.0.1:9', retries: 0}]"
    stages: list[str] = []
    recipe = read_recipe("demo", [*SMALL, nowhere])
    measured = profile_recipe(recipe, slice_sizes(recipe, None), lambda done, total, stage: stages.append(stage))
    assert list(measured.slices) == [1] and measured.score_seconds is None
    assert measured.training is not None and measured.commit_seconds is not None
    slices, scoring = measured.remarks
    assert slices == "slice of 2: OutOfMemoryError: no room for two"
    assert scoring.startswith("scoring: ")
    assert "slice of 2" in stages and "slice of 4" not in stages


def test_rewards_see_the_first_prompt_of_the_recipe(tmp_path: Path) -> None:
    row = PromptRow("encoded", "any", {})
    edit = scored_prompt(read_recipe("edit_demo"), row)
    assert edit.row == "encoded" and edit.text != "any" and "background" in edit.metadata
    missing = read_recipe("edit_demo", [f"prompts.path={tmp_path / 'missing.jsonl'}"])
    assert scored_prompt(missing, row) == row


def test_sizes_are_doubled_as_long_as_they_divide_a_group() -> None:
    recipe = read_recipe("demo", ["batch.samples_per_prompt=24", "batch.slice=6"])
    assert slice_sizes(recipe, None) == (1, 2, 4, 6, 8, 24)
    assert slice_sizes(recipe, 8) == (1, 2, 4, 6, 8)


def test_jobs_that_do_not_divide_the_timed_group_are_no_error() -> None:
    blueprint = read_blueprint(read_recipe("demo", ["training.job_samples=6"]))
    assert read_blueprint(small_batch(blueprint, 4, 2, 0)).shape.group_size == 4
