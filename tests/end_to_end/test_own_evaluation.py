"""An evaluation with its own rewards, size, steps, shift and guidance, of which training notices nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_runs import LiveRuns, lines_of, trained
from PIL import Image
from typer.testing import CliRunner

from digenrl.cli import app
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.contract import DiffusionModel, SampleSize
from digenrl.report.content import content_of
from digenrl.run_folder.folder import RunFolder
from digenrl.run_folder.reading import read_run
from digenrl.worker.blueprint import Blueprint, check_sizes, load_model, read_blueprint

SAME = "evaluation={prompts: {path: prompts.txt}, every: 2, denoising_steps: 2, shown: 2}"
OWN = SAME.removesuffix("}") + (
    ", rewards: [{name: jpeg_compressibility, weight: 2}, 'live_rewards:redness'], height: 32, width: 48,"
    " guidance: 2, shift: 3}"
)
RUN = ("mode=colocated", "steps=2", "checkpoint.every=2")


@pytest.fixture(scope="module")
def runs(live: LiveRuns) -> Iterator[LiveRuns]:
    """Runs in the folder that has the prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(live.root)
        yield live


@pytest.fixture(scope="module")
def run(runs: LiveRuns) -> RunFolder:
    return runs.finished(*RUN, OWN)


def test_it_is_scored_with_its_own_rewards_and_training_with_its_own(run: RunFolder) -> None:
    step, evaluation = lines_of(run.metrics)[0], lines_of(run.evaluations)[0]
    parts = {name for name in step if name.startswith("reward/")}
    assert parts == {"reward/redness"} and step["reward_mean"] == step["reward/redness"]
    total = 2 * evaluation["reward/jpeg_compressibility"] + evaluation["reward/redness"]
    assert evaluation["reward_mean"] == pytest.approx(total)


def test_a_generator_that_scores_uses_the_same_rewards(run: RunFolder, runs: LiveRuns) -> None:
    def numbers(folder: RunFolder) -> list[dict[str, Any]]:
        return [{key: line[key] for key in line if key != "at_s"} for line in lines_of(folder.evaluations)]

    assert numbers(runs.finished(*RUN, OWN, "lanes.rewards=0")) == numbers(run)


def test_its_pictures_have_its_size_also_when_they_are_sampled_again(run: RunFolder, tmp_path: Path) -> None:
    with Image.open(run.grid(2)) as grid:
        assert grid.size == (48 + 4, 2 * 32 + 6)  # two samples, one above the other, in a frame of 2 pixels
    arguments = ["sample", str(run.path), "--out", str(tmp_path / "out"), "--json"]
    sampled = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    assert sampled["guidance"] == 2
    with Image.open(run.grid(2)) as grid, Image.open(tmp_path / "out" / "0000.png") as picture:
        assert grid.crop((2, 2, 50, 34)).tobytes() == picture.tobytes()


def test_training_computes_the_same_whatever_the_evaluation_is(run: RunFolder, runs: LiveRuns) -> None:
    assert trained(run, 2) == trained(runs.finished(*RUN, SAME), 2)


def test_the_report_tells_both_sets_of_rewards_apart(run: RunFolder, runs: LiveRuns) -> None:
    own, held_out = "redness", "2 × jpeg_compressibility + 1 × redness"
    content = content_of(read_run(run.path))
    about = dict(content["about"])
    assert (about["Rewards"], about["Held-out rewards"]) == (own, held_out)
    assert about["Held-out samples"].startswith("48 × 32")
    assert content["curves"]["reward"][0]["title"] == f"Training reward: {own}"
    assert content["curves"]["held_out"][0]["title"] == f"Held-out reward: {held_out}"
    assert content["headline"]["rewards"] == {"training": own, "held_out": held_out}
    printed = CliRunner().invoke(app, ["report", str(run.path)], catch_exceptions=False).stdout
    assert own in printed and "jpeg_compressibility" in printed
    plain = content_of(read_run(runs.finished(*RUN, SAME).path))
    assert "Held-out rewards" not in dict(plain["about"])
    assert plain["curves"]["held_out"][0]["title"] == "Held-out reward"


# --- Without a run -----------------------------------------------------------------------------------------------


def blueprint_of(runs: LiveRuns, **evaluation: Any) -> Blueprint:
    settings = {"prompts": {"name": "scenes"}, "denoising_steps": 2, **evaluation}
    recipe = runs.finished(*RUN, SAME).recipe
    return read_blueprint(parse_model(Recipe, {**recipe.model_dump(), "evaluation": settings}))


@pytest.fixture(scope="module")
def model(runs: LiveRuns) -> DiffusionModel:
    return load_model(blueprint_of(runs), "cpu")


def test_shift_and_size_are_those_of_training_unless_set(runs: LiveRuns, model: DiffusionModel) -> None:
    plain = blueprint_of(runs)
    assert plain.held_out_size == plain.size == SampleSize(16, 16)
    assert plain.held_out_guidance == plain.guidance
    recipe = plain.recipe.model_copy(update={"sample": plain.recipe.sample.model_copy(update={"shift": 7.0})})
    shifted = replace(plain, recipe=recipe)
    levels = [
        each.held_out_schedule(model).sigmas[1].item()
        for each in (plain, shifted, blueprint_of(runs, shift=7), blueprint_of(runs, shift=1))
    ]
    assert levels[1] == levels[2] == pytest.approx(7 / 8) and levels[3] == pytest.approx(0.5)
    own = blueprint_of(runs, width=32, guidance=3)
    assert own.held_out_size == SampleSize(16, 32) and own.held_out_guidance == 3


def test_a_size_that_the_model_cannot_make_is_reported_before_any_work(
    runs: LiveRuns, model: DiffusionModel
) -> None:
    with pytest.raises(ConfigError, match=r"evaluation: height and width .*17 x 16"):
        check_sizes(blueprint_of(runs, height=17), model)
    with pytest.raises(ConfigError, match=r"evaluation\.frames: sd3 makes images"):
        blueprint_of(runs, frames=5)
