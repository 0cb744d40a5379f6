"""Settings that destroy models which were distilled to a few steps are named before a run starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_pipelines import tiny_folder

from digenrl.commands.support.derived_facts import derive_facts
from digenrl.config.recipes.files import read_recipe
from digenrl.worker.blueprint import load_text_encoders, load_whole_model, read_blueprint
from digenrl.worker.checks.distilled import distilled_warnings


def warned_keys(recipe: str, *overrides: str) -> set[str]:
    """The keys that the warnings about a recipe name."""
    lines = distilled_warnings(read_blueprint(read_recipe(recipe, overrides)))
    assert not any("\n" in line for line in lines)
    return {line.split(": ", 1)[1].split("=")[0] for line in lines}


TURBO, KLEIN = "model.source=Tongyi-MAI/Z-Image-Turbo", "model.source=me/flux.2-klein-4b"
GENTLE = ("model.guidance=1", "sample.noise.level=0.3", "sample.window={kind: fast, width: 1}")


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("z_image_flow_grpo", (), set()),  # not distilled
        ("z_image_flow_grpo", (TURBO,), {"model.guidance", "sample.noise.level"}),
        ("z_image_flow_grpo", (TURBO, *GENTLE), set()),
        ("z_image_flow_grpo", (TURBO, *GENTLE, "sample.denoising_steps=16"), set()),
        ("z_image_flow_grpo", (TURBO, *GENTLE, "sample.denoising_steps=17"), {"sample.denoising_steps"}),
        ("flux2_klein_dance_grpo", (KLEIN, *GENTLE, "sample.denoising_steps=4"), set()),
        ("flux2_klein_dance_grpo", (KLEIN, *GENTLE, "sample.denoising_steps=9"), {"sample.denoising_steps"}),
        (
            "sd3_flow_grpo",
            ("model.source=stabilityai/stable-diffusion-3.5-large-turbo", "sample.denoising_steps=8"),
            {"model.guidance", "sample.noise.level"},
        ),
        (
            "hunyuan_video_1_5_flow_grpo",  # distilled to no guidance, with as many steps as before
            (
                "model.source=hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v_distilled",
                "model.guidance=6",
            ),
            {"model.guidance"},
        ),
        ("qwen_image_2_1_flow_grpo", ("model.source=Qwen/Qwen-Image-2.1-Turbo",), {"sample.noise.level"}),
        ("flux_flow_grpo", ("model.source=black-forest-labs/FLUX.1-schnell",), {"sample.noise.level"}),
        (
            "sd3_diffusion_nft",
            (
                "model.family=z_image",
                TURBO,
                "model.guidance=1",
                "sample.denoising_steps=8",
                "model.text_tokens=null",
            ),
            {"algorithm.name"},
        ),
    ],
)
def test_a_warning_names_the_key(recipe: str, overrides: tuple[str, ...], expected: set[str]) -> None:
    assert warned_keys(recipe, *overrides) == expected


def test_the_text_of_a_distilled_model_has_its_published_length_unless_the_recipe_sets_one(tmp_path: Path) -> None:
    """FLUX.1-schnell takes 256 tokens, FLUX.1-dev 512; neither masks padding."""
    folder = shutil.copytree(tiny_folder("flux"), tmp_path / "FLUX.1-schnell")
    settings = folder / "tokenizer_2" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_max_length": 512}))
    schnell = read_recipe("flux_flow_grpo", [f"model.source={folder}"])
    for chosen, length in ((None, 256), (300, 300)):
        recipe = schnell.model_copy(update={"model": schnell.model.model_copy(update={"text_tokens": chosen})})
        blueprint = read_blueprint(recipe)
        text = load_text_encoders(blueprint, "cpu").encode(["a cat"]).positive["encoder_hidden_states"]
        assert text is not None and text.shape[1] == length
        assert load_whole_model(blueprint, "cpu").pipeline_arguments(3.5)["max_sequence_length"] == length
        assert derive_facts(recipe).text_tokens == length
    dev = [f"model.source={tiny_folder('flux')}", "model.text_tokens=null"]
    assert read_blueprint(read_recipe("flux_flow_grpo", dev)).text_tokens is None
