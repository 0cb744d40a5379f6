"""The families that `gpu.py` and `kernel_profile.py` measure: sizes, recipes, and a loaded model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.config.recipes.files import read_recipe
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.contract import Conditioning, DiffusionModel
from digenrl.models.passes.compiled import compile_blocks, is_compiled
from digenrl.models.registry import FAMILIES
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size
from digenrl.worker.blueprint import Blueprint, load_model, load_text_encoders, read_blueprint

PROMPTS = [f'A wooden sign over the door of shop {number} that says "2718"' for number in range(8)]
STEPS_OF_RUN = 3  # the first warms up


@dataclass(frozen=True)
class Case:
    """The settings for a family: groups of `group` samples, generated in slices of the sizes in `slices`."""

    height: int
    width: int
    frames: int = 1
    group: int = 16
    slices: tuple[int, ...] = (1, 8)
    denoising_steps: int = 10
    trained_steps: int = 6
    source: str = "random"


CASES = {
    "flux": Case(512, 512),
    "qwen_image": Case(512, 512),
    "sd3": Case(512, 512),
    "wan": Case(480, 832, 33, group=2, slices=(1,), denoising_steps=4, trained_steps=1, source="random:2.1-14b"),
    "hunyuan_video": Case(480, 640, 33, group=2, slices=(1,), denoising_steps=4, trained_steps=1),
}


@dataclass(frozen=True)
class Loaded:
    """A model on its device, compiled and with adapters, and one encoded prompt without padding."""

    recipe: Recipe
    blueprint: Blueprint
    model: DiffusionModel
    row: Conditioning


def tiny_case(family: str) -> Case:
    size = tiny_size(family)
    return Case(size.height, size.width, size.frames, group=4, slices=(2,), denoising_steps=4, trained_steps=2)


def case_of(family: str, tiny: bool) -> Case:
    return tiny_case(family) if tiny else CASES[family]


def prepared_recipe(family: str, tiny: bool, folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The case's recipe; its prompts and, if it is tiny, its model are written into the folder."""
    case = case_of(family, tiny)
    source = case.source
    if tiny:
        source = str(folder / "model")
        make_tiny_pipeline(family, Path(source))
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    return recipe_of(family, case, source, prompts, tiny, overrides)


def recipe_of(
    family: str, case: Case, source: str, prompts: Path, tiny: bool, overrides: Sequence[str] = ()
) -> Recipe:
    """DanceGRPO with adapters on one device, without a second guidance branch, and with a cheap reward."""
    guidance = ["model.guidance=1"] if FAMILIES[family].uses_negative_prompts else []
    settings = [
        "mode=colocated",
        f"steps={STEPS_OF_RUN}",
        f"model.source={source}",
        f"model.dtype={'float32' if tiny else 'bfloat16'}",
        f"model.vae_dtype={'float32' if tiny else 'bfloat16'}",
        "model.text_tokens=null",
        *guidance,
        f"prompts.path={prompts}",
        "rewards=jpeg_compressibility",
        f"sample.height={case.height}",
        f"sample.width={case.width}",
        f"sample.frames={case.frames}",
        f"sample.denoising_steps={case.denoising_steps}",
        f"sample.window={json.dumps(window(case.trained_steps, case.denoising_steps))}",
        "batch.prompts=1",
        f"batch.samples_per_prompt={case.group}",
        f"batch.slice={max(case.slices)}",
        "algorithm={name: dance_grpo}",
        "training.lora={rank: 32, alpha: 64, init: uniform, targets: null}",
        "training.learning_rate=1e-4",
        "training.autocast='off'",
        "training.gradient_checkpointing=auto",
        "training.old_log_probs=recomputed",
        "logging.tensorboard=false",
        "checkpoint.every=1000",
    ]
    overridden = {each.partition("=")[0] for each in overrides}
    kept = [each for each in settings if each.partition("=")[0] not in overridden]
    return read_recipe(f"{family}_dance_grpo", [*kept, *overrides])


def window(trained_steps: int, denoising_steps: int) -> dict[str, Any]:
    """A random subset of `trained_steps` steps. The last denoising step is never stochastic."""
    return {"kind": "random_subset", "fraction": (trained_steps + 0.05) / (denoising_steps - 1)}


def loaded(recipe: Recipe, device: str, prompt: str = PROMPTS[0]) -> Loaded:
    """Loads and compiles the recipe's model."""
    blueprint = read_blueprint(recipe)
    row = load_text_encoders(blueprint, device).encode([prompt])
    model = load_model(blueprint, device)
    if not is_compiled(model):
        compile_blocks(model, backend="eager")  # the real compiler takes minutes on a CPU
    return Loaded(recipe, blueprint, model, model.compact(row).to(model.device))


def tokens_of(blueprint: Blueprint, row: Conditioning) -> int:
    """The length of the sequence in the blocks: patches of 16 x 16 pixels and, except in Wan, the text."""
    size = blueprint.size
    patches = max(1, size.height // 16) * max(1, size.width // 16) * (1 + (size.frames - 1) // 4)
    text = row.positive["encoder_hidden_states"]
    assert text is not None
    return patches + (0 if blueprint.family.name == "wan" else text.shape[1])
