"""`digenrl sample` and `digenrl export`: samples and weights from a checkpoint.

By default, samples are exactly those of the run's evaluation.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import SD3Transformer2DModel
from PIL import Image, ImageChops
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from digenrl.cli import app
from digenrl.commands.support.diffusers_snippet import pipeline_arguments
from digenrl.commands.train import resume_run, start_run
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.adapters.lora_files import FILE_NAME
from digenrl.models.loading.sources import ModelSource
from digenrl.run_folder.folder import RunFolder, Status
from digenrl.testing.tiny_models import make_tiny_pipeline
from digenrl.worker.clips import clip_suffix
from digenrl.worker.rollouts import held_out_pixels

HELD_OUT = ("a red cat", "a blue dog", "a green apple", "a ship", "a yellow cab", "snow", "a door")
TRAINED_ON = ("a lake", "a roof")
SHOWN = 3  # fewer than a batch of an evaluation has
SIZE = (64, 32)


def recipe_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Two steps that move the weights enough to be seen, on one device."""
    (folder / "held_out.txt").write_text("\n".join(HELD_OUT))
    (folder / "train.txt").write_text("\n".join(TRAINED_ON))
    return {
        "name": "tiny",
        "steps": 2,
        "mode": "colocated",
        "model": {"family": "sd3", "source": str(folder / "sd3"), "guidance": 1.0},
        "prompts": {"path": str(folder / "train.txt")},
        "rewards": "jpeg_compressibility",
        "sample": {"height": SIZE[1], "width": SIZE[0], "denoising_steps": 3},
        "batch": {"prompts": 2, "samples_per_prompt": 2},
        "algorithm": {"name": "flow_grpo", "options": {"updates_per_batch": 1, "kl_weight": 0}},
        "training": {"learning_rate": 1e-2, "pack_size": 4},
        "evaluation": {
            "prompts": {"path": str(folder / "held_out.txt")},
            "every": 1,
            "denoising_steps": 2,
            "batch": 5,
            "shown": SHOWN,
            "seed": 7,
        },
        "checkpoint": {"every": 1},
        "logging": {"tensorboard": False},
        **changes,
    }


def trained(folder: Path, **changes: Any) -> Path:
    """A run in this process."""
    make_tiny_pipeline("sd3", folder / "sd3")
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe_of(folder, **changes)))
    start_run(str(path), [], folder / "run", Console(file=io.StringIO()), as_json=True)
    return folder / "run"


@pytest.fixture(scope="module", autouse=True)
def unchanged_environment() -> Iterator[None]:
    """A run sets the number of threads for its workers."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All weights are trained."""
    return trained(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def averaged_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters, and a moving average of them that is exported."""
    training = {
        "learning_rate": 1e-2,
        "pack_size": 4,
        "lora": {"rank": 2},
        "ema": {"decay": 0.5, "every_updates": 1},
    }
    return trained(tmp_path_factory.mktemp("averaged"), training=training)


def sample(*arguments: object) -> str:
    """The output of the command; its exceptions are raised here."""
    result = CliRunner().invoke(app, ["sample", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def sampled(*arguments: object) -> dict[str, Any]:
    content = json.loads(sample(*arguments, "--json"))
    assert isinstance(content, dict)
    return content


def same_pixels(left: Path, right: Path) -> bool:
    with Image.open(left) as one, Image.open(right) as other:
        return one.size == other.size and ImageChops.difference(one, other).getbbox() is None


def prompts_of(content: dict[str, Any]) -> list[str]:
    return [picture["prompt"] for picture in content["pictures"]]


@pytest.fixture(scope="module")
def newest(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result without any options."""
    return sampled(run, "--out", tmp_path_factory.mktemp("newest") / "pictures")


def test_by_default_the_newest_checkpoint_gives_the_evaluations_grid(run: Path, newest: dict[str, Any]) -> None:
    assert (newest["checkpoint"], newest["weights"]) == ("step_000002", "trained")
    assert same_pixels(Path(newest["grid"]), run / "samples" / "step_000002.png")
    names = {path.name for path in Path(newest["folder"]).iterdir()}
    assert names == {"0000.png", "0001.png", "0002.png", "grid.png", "samples.json"}


def test_a_sample_that_is_not_finite_is_an_error_and_nothing_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(*arguments: Any) -> Tensor:
        pixels_BFCHW = held_out_pixels(*arguments)
        pixels_BFCHW[1, 0, 0, 0, 0] = torch.nan
        return pixels_BFCHW

    monkeypatch.setattr("digenrl.commands.sample.held_out_pixels", spoiled)
    with pytest.raises(ConfigError, match=f"sample 1 .*{HELD_OUT[1]}.*finite"):
        sample(run, "--out", tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()


@pytest.mark.parametrize(("name", "steps_done"), [("before", 0), ("step_000001", 1)])
def test_other_checkpoints_and_the_untrained_model_give_their_grids(
    run: Path, tmp_path: Path, name: str, steps_done: int
) -> None:
    content = sampled(run, "--checkpoint", name, "--out", tmp_path / "pictures")
    assert content["weights"] == ("trained" if steps_done else "untrained")
    grids = [RunFolder.open(run).grid(step) for step in range(3)]
    assert same_pixels(Path(content["grid"]), grids[steps_done])
    assert not same_pixels(Path(content["grid"]), grids[2])  # otherwise this test would prove nothing


def test_images_are_those_of_the_grid_with_a_description_beside_them(newest: dict[str, Any]) -> None:
    folder = Path(newest["folder"])
    description = json.loads((folder / "samples.json").read_text())
    assert description["pictures"] == newest["pictures"]
    assert prompts_of(newest) == list(HELD_OUT[:SHOWN])
    assert [description[key] for key in ("denoising_steps", "guidance", "seed")] == [2, 1.0, 7]
    with Image.open(newest["grid"]) as grid, Image.open(folder / "0000.png") as first:
        assert first.size == SIZE
        corner = grid.crop((2, 2, 2 + SIZE[0], 2 + SIZE[1]))
        assert ImageChops.difference(first, corner).getbbox() is None


def test_without_out_each_call_creates_a_new_folder_in_the_run(run: Path) -> None:
    taken = run / "sampled" / "step_000002-1"
    taken.mkdir(parents=True)
    printed = sample(run, "--count", 1)
    assert "step_000002 (trained): 1 sample\n" in printed
    assert (run / "sampled" / "step_000002-2" / "0000.png").is_file()
    assert not any(taken.iterdir())


def test_prompts_repeat_with_other_noise(run: Path, tmp_path: Path) -> None:
    given = ("--prompt", "a house", "--prompt", "a hill")
    content = sampled(run, *given, "--count", 3, "--out", tmp_path / "pictures")
    assert prompts_of(content) == ["a house", "a hill", "a house"]
    assert not same_pixels(tmp_path / "pictures" / "0000.png", tmp_path / "pictures" / "0002.png")


def test_a_prompt_file_gives_as_many_samples_as_a_grid_has(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"number {index}"}) + "\n" for index in range(5)))
    assert prompts_of(sampled(run, "--prompts", file)) == ["number 0", "number 1", "number 2"]


@pytest.mark.parametrize("option", [("--seed", 8), ("--steps", 3), ("--guidance", 4.0)])
def test_other_settings_give_other_samples(run: Path, tmp_path: Path, option: tuple[str, object]) -> None:
    content = sampled(run, *option, "--out", tmp_path / "pictures")
    assert not same_pixels(Path(content["grid"]), run / "samples" / "step_000002.png")


@pytest.fixture(scope="module")
def printed(averaged_run: Path) -> str:
    """The output for the newest checkpoint."""
    return sample(averaged_run, "--out", averaged_run / "pictures")


def test_the_exported_average_is_sampled_and_mentioned_as_in_evaluations(averaged_run: Path, printed: str) -> None:
    assert "step_000002 (moving average): 3 samples" in printed
    assert "evaluations use" not in printed
    assert f"wrote {averaged_run / 'pictures' / 'grid.png'}" in printed
    assert same_pixels(averaged_run / "pictures" / "grid.png", averaged_run / "samples" / "step_000002.png")


def test_weights_that_evaluations_round_are_mentioned(averaged_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(averaged_run, tmp_path / "run"))
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    recipe |= {"mode": "local", "publish": {"dtype": "bfloat16"}, "techniques": {"tag": "none"}}
    recipe["training"]["old_log_probs"] = "recomputed"
    (run / "config.yaml").write_text(yaml.safe_dump(recipe))
    assert "evaluations use those that generate" in sample(run, "--count", 1, "--steps", 1)


def test_a_run_starts_where_an_exported_lora_ended_and_resumes_without_it(
    averaged_run: Path, tmp_path: Path
) -> None:
    lora = shutil.copytree(averaged_run / "lora", tmp_path / "lora")
    training = {"learning_rate": 1e-2, "pack_size": 4, "lora": {"rank": 2, "start_from": str(lora)}}
    run = trained(tmp_path, steps=1, training=training)
    assert same_pixels(run / "samples" / "step_000000.png", averaged_run / "samples" / "step_000002.png")
    shutil.rmtree(lora)
    assert resume_run(run, ["steps=2"], Console(file=io.StringIO()), as_json=True) is Status.FINISHED
    content = sampled(run, "--out", tmp_path / "pictures")
    assert same_pixels(Path(content["grid"]), run / "samples" / "step_000002.png")
    with pytest.raises(ConfigError, match=r"start_from: .*no such file"):
        sampled(run, "--checkpoint", "before", "--out", tmp_path / "more")


def test_untrained_adapters_change_nothing(averaged_run: Path, tmp_path: Path) -> None:
    content = sampled(averaged_run, "--checkpoint", "before", "--out", tmp_path / "pictures")
    assert same_pixels(Path(content["grid"]), averaged_run / "samples" / "step_000000.png")


def test_the_printed_lines_load_full_weights_into_diffusers(run: Path, newest: dict[str, Any]) -> None:
    names: dict[str, Any] = {}
    exec("\n".join(newest["loading"]), names)
    loaded = names["pipe"].transformer.state_dict()
    saved = load_file(run / "checkpoints" / "step_000002" / "weights.safetensors")
    assert saved
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


def test_the_printed_lines_load_adapters_into_diffusers(averaged_run: Path, printed: str) -> None:
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in printed.splitlines() if line.startswith("  ")), names)
    average = load_file(averaged_run / "checkpoints" / "step_000002" / "average.safetensors")
    parameters = names["pipe"].transformer.named_parameters()
    adapters = {name.replace(".default_0.", ".default."): value for name, value in parameters if ".lora_" in name}
    assert adapters.keys() == average.keys() != set()
    for name, value in average.items():  # alpha / rank is 32
        assert torch.equal(adapters[name], value * 32 if ".lora_B." in name else value)


# --- Export -----------------------------------------------------------------------------------------------------


def export(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize("to", ["diffusers", "merged"])
def test_fully_trained_weights_are_exported(run: Path, tmp_path: Path, to: str) -> None:
    printed = export(run, "--to", to, "--checkpoint", "step_000001", "--out", tmp_path / "out")
    assert "step_000001 (trained)" in printed and f"wrote {tmp_path / 'out'}" in printed
    loaded = SD3Transformer2DModel.from_pretrained(tmp_path / "out" / "transformer").state_dict()
    saved = load_file(run / "checkpoints" / "step_000001" / "weights.safetensors")
    assert saved
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


def test_the_exported_average_is_that_of_the_newest_checkpoint(averaged_run: Path) -> None:
    content = json.loads(export(averaged_run, "--to", "diffusers", "--json"))
    assert (content["checkpoint"], content["weights"]) == ("step_000002", "moving average")
    assert content["folder"] == str(averaged_run / "exported" / "diffusers-1")
    written, newest = (
        load_file(folder / FILE_NAME) for folder in (Path(content["folder"]), averaged_run / "lora")
    )
    assert written.keys() == newest.keys() != set()
    assert all(torch.equal(value, newest[name]) for name, value in written.items())
    assert content["remark"] == ""


def test_an_average_that_has_not_followed_yet_is_pointed_out(averaged_run: Path, tmp_path: Path) -> None:
    short = Path(shutil.copytree(averaged_run, tmp_path / "run"))
    config = short / "config.yaml"
    config.write_text(config.read_text().replace("every_updates: 1", "every_updates: 50"))
    assert "follows every 50 updates" in export(short, "--to", "diffusers")


def test_the_printed_lines_load_a_subfolder_of_the_hub() -> None:
    source = ModelSource("me/models", revision="v1", subfolder="deep/sd3")
    assert pipeline_arguments(source) == 'snapshot_download("me/models", revision="v1") + "/deep/sd3"'


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--to", "comfyui"), "trained all weights.*merged"),
        (("--to", "peft"), "trained all weights.*merged"),
        (("--to", "comfy"), "unknown 'comfy'.*comfyui"),
        (("--to", "merged", "--checkpoint", "step_9"), "unknown 'step_9'"),
        (("--to", "merged", "--checkpoint", "before"), "nothing to export"),
        (("--to", "merged", "--out", "."), "not empty"),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_writes_nothing(
    run: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    before = sorted(run.rglob("*"))
    arguments = tuple(str(run) if word == "." else word for word in arguments)
    with pytest.raises(ConfigError, match=complaint):
        export(run, *arguments)
    assert sorted(run.rglob("*")) == before


# --- Runs that were never trained -------------------------------------------------------------------------------


def started(folder: Path, family: str, **changes: Any) -> Path:
    """A run's folder before the first checkpoint."""
    make_tiny_pipeline(family, folder / "pipeline")
    model = {"family": family, "source": str(folder / "pipeline"), "guidance": 1.0}
    recipe = parse_model(Recipe, recipe_of(folder, model=model, **changes))
    return RunFolder.create(folder / "run", recipe, datetime.now(UTC)).path


def test_a_run_without_evaluation_shows_its_training_prompts(tmp_path: Path) -> None:
    run = started(tmp_path, "sd3", evaluation=None)
    content = sampled(run, "--checkpoint", "before", "--steps", 1)
    assert prompts_of(content) == list(TRAINED_ON)
    assert content["loading"] == []


def test_a_video_is_a_clip_and_its_middle_frame(tmp_path: Path) -> None:
    size = {"height": 32, "width": 32, "frames": 5, "denoising_steps": 2}
    run = started(tmp_path, "wan", sample=size)
    content = sampled(run, "--checkpoint", "before", "--count", 1, "--steps", 1)
    (picture,) = content["pictures"]
    assert picture["clip"] == f"0000{clip_suffix()}"
    assert (Path(content["folder"]) / picture["clip"]).stat().st_size > 0
    with Image.open(Path(content["folder"]) / picture["file"]) as still:
        assert still.size == (32, 32)


def test_before_the_first_checkpoint_the_untrained_model_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint.* --checkpoint before"):
        sample(started(tmp_path, "sd3"))


# --- Errors ---------------------------------------------------------------------------------------------------


def test_for_an_unknown_checkpoint_the_known_ones_are_listed(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"'step_000002'.* step_000001, step_000002; .* before"):
        sample(run, "--checkpoint", "step_00002")


def test_a_folder_that_is_not_empty_is_never_written_to(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match=r"not empty.*mine.txt"):
        sample(run, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(ConfigError, match="is a file; name a new folder"):
        sample(run, "--out", tmp_path / "mine.txt")


def test_a_damaged_checkpoint_is_refused_and_leaves_no_folder_behind(run: Path, tmp_path: Path) -> None:
    weights = run / "checkpoints" / "step_000001" / "weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    try:
        with pytest.raises(ConfigError, match="damaged"):
            sample(run, "--checkpoint", "step_000001", "--out", tmp_path / "pictures")
    finally:
        weights.write_bytes(whole)
    assert not (tmp_path / "pictures").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", " "), "--prompt"),
        (("--prompt", "a cat", "--prompts", "p.txt"), "--prompt and --prompts"),
        (("--prompts", "p.csv"), "--prompts: p.csv"),
        (("--prompts", "nowhere.txt"), "nowhere.txt"),
        (("--device", "gpu"), "--device: unknown device 'gpu'"),
        (("--device", "cuda:99"), "--device: cuda:99"),
    ],
)
def test_errors_are_raised_before_anything_is_loaded(run: Path, arguments: tuple[str, ...], message: str) -> None:
    before = sorted(run.iterdir())
    with pytest.raises(ConfigError) as raised:
        sample(run, *arguments)
    assert message in str(raised.value)
    assert sorted(run.iterdir()) == before
