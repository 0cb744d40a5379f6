"""Settings that destroy models which were distilled to a few steps are named before a run starts."""

from __future__ import annotations

import pytest

from digenrl.config.recipes.files import read_recipe
from digenrl.worker.blueprint import read_blueprint
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
                "sample.denoising_steps=9",
                "model.text_tokens=null",
            ),
            {"algorithm.name"},
        ),
    ],
)
def test_a_warning_names_the_key(recipe: str, overrides: tuple[str, ...], expected: set[str]) -> None:
    assert warned_keys(recipe, *overrides) == expected
