"""Mistakes in recipes with source images are found before anything is downloaded or loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from source_pictures import picture

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.models.loading.hub import HubRepository
from digenrl.worker.checks.preflight import inspect_here


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(self: HubRepository, name: str) -> Path:
        raise AssertionError(f"{name} was fetched")

    monkeypatch.setattr(HubRepository, "fetch", fetch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    picture(0, 20, 30).save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:10])
    (tmp_path / "cats.txt").write_text("a cat\n")
    for name, images in (
        ("one", ["a.png"]),
        ("two", ["a.png", "a.png"]),
        ("none", []),
        ("absent", ["b.png"]),
        ("broken", ["broken.png"]),
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "redder", "images": images}))
    return tmp_path


@pytest.mark.parametrize(
    ("recipe", "prompts", "override", "message"),
    [
        (
            "flux_kontext_one_gpu",
            "cats.txt",
            "seed=1",
            r"cats\.txt:1: has no source images, .*flux_kontext needs 1 ",
        ),
        ("flux_kontext_one_gpu", "none.jsonl", "seed=1", r"none\.jsonl:1: has no source images"),
        (
            "flux_kontext_one_gpu",
            "one.jsonl",
            "prompts.image_column=img",
            r"one\.jsonl: no prompt has a source image in 'img'; other columns: .*image",
        ),
        (
            "flux_kontext_one_gpu",
            "two.jsonl",
            "seed=1",
            r"two\.jsonl:1: .*2 source images, .*at most 1 .*qwen_image_edit",
        ),
        ("flux_one_gpu", "one.jsonl", "seed=1", r"one\.jsonl:1: .*flux takes no source images.*flux_kontext"),
        ("qwen_image_edit_one_gpu", "absent.jsonl", "seed=1", r"absent\.jsonl:1: .*b\.png does not exist"),
        ("qwen_image_edit_one_gpu", "broken.jsonl", "seed=1", r"broken\.jsonl:1: .*broken\.png is not an image"),
        ("flux_kontext_one_gpu", "one.jsonl", "sample.height=500", r"sample: .*multiples of 16, got 500 x 512"),
        (
            "qwen_image_edit_one_gpu",
            "one.jsonl",
            "evaluation.width=40",
            r"evaluation: .*multiples of 16, got 512 x 40",
        ),
        ("sd3_one_gpu", "cats.txt", "sample.width=500", r"sample: .*multiples of 16, got 512 x 500"),
        ("flux_kontext_one_gpu", "one.jsonl", "sample.source_size=fit", r"sample\.source_size.*'crop' or 'area'"),
        ("demo", "one.jsonl", "sample.source_size=area", r"sample\.source_size: area.*sd3.* crop"),
        ("wan_i2v_one_gpu", "one.jsonl", "sample.source_size=area", r"sample\.source_size: area.*wan_i2v.* crop"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(
    folder: Path, recipe: str, prompts: str, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        inspect_here(read_recipe(recipe, [f"prompts.path={folder / prompts}", override]))
    assert "\n" not in str(caught.value)


def test_a_recipe_with_an_image_for_every_prompt_is_accepted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("digenrl.worker.checks.preflight.total_host_bytes", lambda: 10**12)
    for prompts in ("one", "two"):
        overrides = [f"prompts.path={folder / prompts}.jsonl", "model.source=random"]
        inspect_here(read_recipe("qwen_image_edit_one_gpu", overrides))
