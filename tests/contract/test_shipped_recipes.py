"""Every shipped recipe is valid and fits its model and algorithm."""

from __future__ import annotations

from functools import cache

import pytest
from torch import nn

from digenrl.algorithms.registry import build_algorithm
from digenrl.commands.support.model_memory import memory_needs
from digenrl.config.recipes.files import read_recipe, shipped_recipes
from digenrl.config.recipes.recipe import LaneSettings, Recipe
from digenrl.generation.windows import choose_steps
from digenrl.models.adapters.lora import target_layers
from digenrl.models.objective import Objective
from digenrl.models.registry import FAMILIES, find_family
from digenrl.prompts.sources import read_prompts
from digenrl.records import SampleId
from digenrl.worker.blueprint import lora_targets, read_blueprint, transformer_without_weights

CARDS_OF_24GB = ("sd3_24gb", "flux_24gb", "qwen_image_24gb", "wan_14b_24gb")
ONE_GPU = (*(name for name in shipped_recipes() if name.endswith("_one_gpu")), *CARDS_OF_24GB)
DEMOS = ("demo", "edit_demo", "pairs_demo")
SAMPLES = [SampleId(step, group=0, index=index) for step in (0, 7, 700) for index in (0, 5)]

each_recipe = pytest.mark.parametrize("name", shipped_recipes())


@cache
def shipped(name: str) -> Recipe:
    return read_recipe(name)


def algorithm_of(recipe: Recipe) -> Objective:
    return build_algorithm(recipe.algorithm.name, recipe.algorithm.options)


def test_every_family_has_a_recipe_named_after_it() -> None:
    trained = {name: shipped(name).model.family for name in shipped_recipes()}
    assert set(trained.values()) == set(FAMILIES)
    assert all(name.startswith(family) for name, family in trained.items() if name not in DEMOS)


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
    assert recipe.model.source in DEMOS or recipe.model.source.count("/") == 1


@each_recipe
def test_its_window_keeps_the_same_number_of_steps_of_every_sample_and_never_the_last(name: str) -> None:
    recipe = shipped(name)
    steps = recipe.sample.denoising_steps
    recipe.window.check(steps)
    choices = [choose_steps(recipe.window, steps, recipe.seed, sample) for sample in SAMPLES]
    assert all(steps - 1 not in choice.kept for choice in choices)
    assert all(choice.kept for choice in choices) or algorithm_of(recipe).settings.replays == "renoised"
    assert len({len(choice.kept) for choice in choices}) == 1


@each_recipe
def test_its_batch_fits_the_algorithm(name: str) -> None:
    recipe = shipped(name)
    algorithm = algorithm_of(recipe)
    assert algorithm.updates_per_batch <= recipe.batch.prompts
    group = recipe.batch.samples_per_prompt
    advantages = algorithm.group_advantages([float(index) for index in range(group)])
    assert 2 <= len(advantages.chosen) <= group
    assert recipe.batch.slice == (group if name in DEMOS else "auto")


@each_recipe
def test_trained_weights_are_never_kept_in_half_precision(name: str) -> None:
    recipe = shipped(name)
    assert recipe.training.lora is not None or recipe.model.dtype == "float32"


@each_recipe
def test_old_log_probs_are_recomputed_if_forwards_are_in_bf16(name: str) -> None:
    """Adapters compute in the dtype of a bf16 base; fully trained weights are fp32 and need autocast."""
    recipe = shipped(name)
    in_bf16 = "bf16" if name not in DEMOS else "off"
    assert recipe.training.autocast == ("off" if recipe.training.lora else in_bf16)
    assert recipe.model.dtype == ("bfloat16" if recipe.training.lora else "float32")
    replayed = name not in DEMOS and algorithm_of(recipe).settings.replays == "steps"
    assert recipe.training.old_log_probs == ("recomputed" if replayed else "rollout")


@each_recipe
def test_it_assumes_no_particular_machine(name: str) -> None:
    lanes = shipped(name).lanes
    assert lanes.model_copy(update={"memory_gib": None}) == LaneSettings()
    assert (lanes.memory_gib is not None) == (name in CARDS_OF_24GB)


@pytest.mark.parametrize("name", CARDS_OF_24GB)
def test_a_recipe_for_24_gb_needs_less_than_that_on_every_card(name: str) -> None:
    """Of a model with the published layers: weights, adapters, their state, one sample and one trained pair."""
    recipe = shipped(name)
    needs = memory_needs(recipe, None, text_encoder_bytes=0)
    assert recipe.lanes.memory_gib is not None and recipe.lanes.memory_gib < 23
    assert max(needs.generate, needs.train) < recipe.lanes.memory_gib * 2**30
    unquantized = recipe.model_copy(update={"model": recipe.model.model_copy(update={"base": "unquantized"})})
    assert memory_needs(unquantized, None, 0).train > 1.15 * needs.train


def test_the_memory_of_a_card_is_that_of_the_recipes_lanes() -> None:
    recipe = shipped("flux_24gb")
    fp8 = recipe.model.model_copy(update={"base": "fp8"})
    apart, one_card = (
        memory_needs(recipe.model_copy(update={"model": fp8, "mode": mode}), None, 0)
        for mode in ("local", "colocated")
    )
    assert one_card.generate > 1.5 * apart.generate, "the transposed weights of the backward stay on the card"
    assert one_card.train == apart.train
    lanes = recipe.lanes.model_copy(update={"ranks": 2, "cards_per_replica": 2})
    assert (
        memory_needs(recipe.model_copy(update={"lanes": lanes}), None, 0).train
        < memory_needs(recipe, None, 0).train
    )


@pytest.mark.parametrize("name", DEMOS)
def test_a_demo_is_evaluated_on_held_out_prompts(name: str) -> None:
    recipe = shipped(name)
    assert recipe.evaluation is not None
    train = {(prompt.text, prompt.images) for prompt in read_prompts(recipe.prompts)}
    held_out = {(prompt.text, prompt.images) for prompt in read_prompts(recipe.evaluation.prompts)}
    assert train and held_out and not train & held_out
    assert recipe.training.lora is None and recipe.training.autocast == "off"


@each_recipe
def test_its_family_and_algorithm_support_its_settings(name: str) -> None:
    recipe = read_recipe(name, [] if name in DEMOS else ["model.source=random"])
    assert read_blueprint(recipe).recipe == recipe


@pytest.mark.parametrize(
    ("name", "layers", "million_parameters"),
    [
        ("sd3_flow_grpo", 191, 18.8),
        ("flux_flow_grpo", 342, 179.3),
        ("flux_dance_grpo", 190, 149.4),
        ("qwen_image_flow_grpo", 720, 424.7),
    ],
)
def test_its_adapters_have_the_published_size(name: str, layers: int, million_parameters: float) -> None:
    blueprint = read_blueprint(read_recipe(name, ["model.source=random"]))
    lora = blueprint.recipe.training.lora
    assert lora is not None
    modules = dict(transformer_without_weights(blueprint).named_modules())
    adapted = [
        modules[path] for path in target_layers(modules[""], lora_targets(blueprint.recipe, blueprint.family))
    ]
    assert len(adapted) == layers
    sides = sum(layer.in_features + layer.out_features for layer in adapted if isinstance(layer, nn.Linear))
    assert lora.rank * sides == pytest.approx(million_parameters * 1e6, rel=3e-3)
