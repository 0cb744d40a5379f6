"""Every shipped recipe is valid, fits its model and algorithm, and has the published numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from digenrl.algorithms.contract import Algorithm
from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipe import LaneSettings, Recipe
from digenrl.config.recipe_files import read_recipe, shipped_recipes
from digenrl.generation.windows import choose_steps
from digenrl.models.registry import FAMILIES, find_family
from digenrl.models.trajectory import StepNoise
from digenrl.prompts.sources import read_prompts
from digenrl.records import SampleId

ONE_GPU = ("sd3_one_gpu", "flux_one_gpu", "qwen_image_one_gpu")
EXPERIMENTS = ("sd3_flow_grpo_fast", "flux_mix_grpo", "demo", *ONE_GPU)
SAMPLES = [SampleId(step, group=0, index=index) for step in (0, 7, 700) for index in (0, 5)]

each_recipe = pytest.mark.parametrize("name", shipped_recipes())


def shipped(name: str) -> Recipe:
    return read_recipe(name)


def algorithm_of(recipe: Recipe) -> Algorithm:
    return build_algorithm(recipe.algorithm.name, recipe.algorithm.options)


def test_every_family_has_a_recipe_for_both_algorithms() -> None:
    both = {f"{family}_{algorithm}" for family in FAMILIES for algorithm in ("flow_grpo", "dance_grpo")}
    assert set(shipped_recipes()) == both.union(EXPERIMENTS)


@pytest.mark.parametrize("name", ONE_GPU)
def test_a_recipe_for_one_gpu_shares_one_copy_of_the_base_weights(name: str) -> None:
    recipe = shipped(name)
    assert recipe.topology.shares_cards and recipe.training.lora is not None and recipe.model.dtype == "bfloat16"
    assert recipe.training.pack_size == recipe.training.gradient_checkpointing == recipe.batch.slice == "auto"


@each_recipe
def test_its_family_makes_samples_of_this_size(name: str) -> None:
    recipe = shipped(name)
    family = find_family(recipe.model.family)
    assert (family.kind == "video") == (recipe.sample.frames > 1)
    assert recipe.sample.height % 16 == recipe.sample.width % 16 == 0
    assert recipe.sample.frames % 4 == 1
    assert recipe.model.source == "demo" or recipe.model.source.count("/") == 1


@each_recipe
def test_its_window_keeps_the_same_number_of_steps_of_every_sample_and_never_the_last(name: str) -> None:
    recipe = shipped(name)
    steps = recipe.sample.denoising_steps
    recipe.window.check(steps)
    choices = [choose_steps(recipe.window, steps, recipe.seed, sample) for sample in SAMPLES]
    assert all(choice.kept and steps - 1 not in choice.kept for choice in choices)
    assert len({len(choice.kept) for choice in choices}) == 1


@each_recipe
def test_its_batch_fits_the_algorithm(name: str) -> None:
    recipe = shipped(name)
    algorithm = algorithm_of(recipe)
    assert algorithm.updates_per_batch <= recipe.batch.prompts
    group = recipe.batch.samples_per_prompt
    advantages = algorithm.group_advantages([float(index) for index in range(group)])
    assert 2 <= len(advantages.chosen) <= group
    assert recipe.batch.slice == (group if name == "demo" else "auto")


@each_recipe
def test_trained_weights_are_never_kept_in_half_precision(name: str) -> None:
    recipe = shipped(name)
    assert recipe.training.lora is not None or recipe.model.dtype == "float32"


@each_recipe
def test_old_log_probs_are_recomputed_if_forwards_are_in_bf16(name: str) -> None:
    """Adapters compute in the dtype of a bf16 base; fully trained weights are fp32 and need autocast."""
    recipe = shipped(name)
    in_bf16 = "bf16" if name != "demo" else "off"
    assert recipe.training.autocast == ("off" if recipe.training.lora else in_bf16)
    assert recipe.model.dtype == ("bfloat16" if recipe.training.lora else "float32")
    assert recipe.training.old_log_probs == ("rollout" if name == "demo" else "recomputed")


@each_recipe
def test_it_assumes_no_particular_machine(name: str) -> None:
    assert shipped(name).lanes == LaneSettings()


@dataclass(frozen=True, slots=True)
class Published:
    """Published settings; `more` holds further values by dotted key."""

    size: tuple[int, int, int]
    steps: int
    noise: StepNoise
    group: int
    prompts: int
    clip: float
    learning_rate: float
    lora: tuple[int, int] | None
    more: dict[str, Any]


IMAGE, LARGE_IMAGE = (512, 512, 1), (720, 720, 1)
FLOW, CPS, DANCE = (partial(StepNoise, kind) for kind in ("flow", "cps", "dance"))
SUBSET = {"kind": "random_subset", "fraction": 0.6}
EMA = {"training.ema.decay": 0.9, "training.ema.every_updates": 8}

PUBLISHED = {
    "sd3_flow_grpo": Published(
        *(IMAGE, 10, FLOW(0.7), 24, 48, 1e-4, 3e-4, (32, 64)),
        {"options.kl_weight": 0.04, "options.updates_per_batch": 2, "model.guidance": 4.5, **EMA},
    ),
    "sd3_flow_grpo_fast": Published(
        *(IMAGE, 10, CPS(0.8), 24, 48, 1e-5, 3e-4, (32, 64)),
        {"model.guidance": 1, "sample.window": {"kind": "fast", "width": 3}, "options.updates_per_batch": 2},
    ),
    "flux_flow_grpo": Published(
        *(IMAGE, 6, FLOW(0.9), 24, 48, 1e-4, 3e-4, (64, 128)),
        {"model.guidance": 3.5, "options.updates_per_batch": 2},
    ),
    "flux_dance_grpo": Published(
        *(LARGE_IMAGE, 16, DANCE(0.3), 12, 16, 1e-4, 3e-4, (128, 256)),
        {"sample.shift": 3, "sample.window": SUBSET, "model.guidance": 3.5},
    ),
    "flux_mix_grpo": Published(
        *(LARGE_IMAGE, 25, FLOW(0.7), 12, 16, 1e-4, 1e-5, None),
        {
            "sample.window": {"kind": "sliding", "width": 4, "training_steps_per_shift": 25},
            "options.updates_per_batch": 4,
        },
    ),
    "qwen_image_flow_grpo": Published(
        *(IMAGE, 10, FLOW(1.2), 16, 32, 1e-5, 3e-4, (64, 128)),
        {"sample.window": {"kind": "fast", "width": 2}, "model.guidance": 4},
    ),
    "wan_flow_grpo": Published(
        *((240, 416, 33), 20, FLOW(0.7), 4, 8, 1e-3, 1e-4, (32, 64)),
        {"options.kl_weight": 0.004, "options.kl_form": "exact", "model.guidance": 4.5},
    ),
    "hunyuan_video_dance_grpo": Published(
        *((480, 480, 53), 16, DANCE(0.25), 24, 32, 1e-4, 1e-5, None),
        {
            "sample.shift": 5,
            "sample.window": SUBSET,
            "options.best_of_n.top": 4,
            "options.best_of_n.bottom": 4,
            "model.guidance": 6,
        },
    ),
}


def value_at(recipe: Recipe, key: str) -> Any:
    """A value by its dotted key; `options` are the algorithm's settings with defaults."""
    first, _, rest = key.partition(".")
    found: Any = algorithm_of(recipe).settings if first == "options" else getattr(recipe, first)
    for part in rest.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items(), ids=list(PUBLISHED))
def test_its_numbers_are_the_published_ones(name: str, published: Published) -> None:
    recipe = shipped(name)
    sample, training = recipe.sample, recipe.training
    assert (sample.height, sample.width, sample.frames) == published.size
    assert sample.denoising_steps == published.steps
    assert StepNoise(sample.noise.kind, sample.noise.level) == published.noise
    assert (recipe.batch.samples_per_prompt, recipe.batch.prompts) == (published.group, published.prompts)
    assert value_at(recipe, "options.clip") == published.clip
    assert training.learning_rate == published.learning_rate
    assert (training.lora and (training.lora.rank, training.lora.alpha)) == published.lora
    assert (training.betas, training.weight_decay, training.gradient_norm) == ((0.9, 0.999), 1e-4, 1.0)
    for key, value in published.more.items():
        assert value_at(recipe, key) == value, key


def test_the_demo_is_evaluated_on_held_out_prompts() -> None:
    recipe = shipped("demo")
    assert recipe.evaluation is not None
    train = {prompt.text for prompt in read_prompts(recipe.prompts)}
    held_out = {prompt.text for prompt in read_prompts(recipe.evaluation.prompts)}
    assert train and held_out and not train & held_out
    assert recipe.training.lora is None and recipe.training.autocast == "off"
