"""Models whose frozen weights are quantized: which layers, training, export, random weights, text encoders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file
from scored_groups import Rollout, nudge, scored_groups, trainer_of
from tiny_pipelines import shared_tiny_model, tiny_folder
from torch import nn

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.config.recipes.training import TrainerSettings
from digenrl.driver.placement import place
from digenrl.models.adapters.lora import adapters_disabled, add_lora
from digenrl.models.adapters.lora_files import FILE_NAME, save_lora
from digenrl.models.blocks import repeated_blocks
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.quantized.layers import QuantizedLinear
from digenrl.models.quantized.replacing import BaseWeights, block_weights, check_has_blocks
from digenrl.models.registry import FAMILIES
from digenrl.testing.tiny_models import tiny_size
from digenrl.worker.assignment import Machine
from digenrl.worker.blueprint import load_for_evaluation, load_model, load_text_encoders, read_blueprint
from digenrl.worker.rollouts import held_out_pixels

PRECISIONS = ("nf4", "int8", "fp8")
each_precision = pytest.mark.parametrize("precision", PRECISIONS)
LORA = ("training={old_log_probs: recomputed, lora: {rank: 2}}",)
WEIGHED = ("algorithm.options={stale: decoupled, weighted: all}",)
REWARDS = [(0.0, 1.0, 3.0, 2.0), (5.0, 2.0, 1.0, 0.0)]


def load(family: str, precision: str, dtype: torch.dtype = torch.float32, **how: bool) -> PipelineModel:
    return FAMILIES[family].load(tiny_folder(family), dtype, base=BaseWeights(precision), **how)


def quantized_paths(module: nn.Module) -> set[str]:
    return {path for path, each in module.named_modules() if isinstance(each, QuantizedLinear)}


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_linear_layers_of_the_blocks_are_quantized(family):
    plain = shared_tiny_model(family)
    model = load(family, "nf4", torch.bfloat16, text_encoders=False)
    blocks = {id(each) for block in repeated_blocks(plain.transformer) for each in block.modules()}
    linears = {path: each for path, each in plain.transformer.named_modules() if isinstance(each, nn.Linear)}
    expected = {path for path, each in linears.items() if id(each) in blocks}
    assert quantized_paths(model.transformer) == expected and len(expected) < len(linears)
    assert model.dtype == torch.bfloat16, "inputs are cast to the dtype of the quantized layers, not of the others"
    quantized = (each for each in model.transformer.modules() if isinstance(each, QuantizedLinear))
    assert block_weights(plain.transformer) == sum(each.weight_count for each in quantized)


@each_precision
def test_the_first_update_has_a_ratio_of_exactly_one_and_trains_the_adapters(precision):
    model = load("flux", precision)
    add_lora(model, rank=2, alpha=4, seed=0)
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 1, "kl_weight": 0.01})
    rollout = Rollout(groups=2, group_size=4, steps=3, slice_size=4, size=tiny_size("flux"))
    groups = scored_groups(model, algorithm, rollout, REWARDS)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=4, learning_rate=1e-2))
    before = weights_state(model)
    for group in groups:
        trainer.add_group(group)
    metrics = trainer.commit()
    assert (metrics.ratio_mean, metrics.ratio_max, metrics.log_prob_mismatch) == (1.0, 1.0, 0.0)
    assert metrics.gradient_norm > 0
    assert any(not torch.equal(before[name], value) for name, value in weights_state(model).items())


@pytest.mark.parametrize("family", ["sd3", "wan"])
def test_the_reference_is_the_quantized_base_without_adapters(family):
    bare, model = load(family, "nf4"), load(family, "nf4")
    add_lora(model, rank=2, alpha=4, seed=0)
    nudge(model, 0.5, seed=1)
    size, text = tiny_size(family), bare.encode(["a cat"])
    latents = bare.initial_latents(torch.randn(1, *bare.noise_shape(size)), size)
    times = bare.schedule(3, size).timesteps[:1]

    def velocity(each: PipelineModel) -> torch.Tensor:
        with torch.no_grad():
            return each.velocity(latents, times, text, 1.0, size)

    with adapters_disabled(model):
        assert torch.equal(velocity(model), velocity(bare))
    assert not torch.equal(velocity(model), velocity(bare))


def test_the_exported_lora_is_that_of_an_unquantized_model_and_loads_in_diffusers(tmp_path):
    for precision in ("unquantized", "nf4"):
        model = load("sd3", precision)
        add_lora(model, rank=2, alpha=4, seed=0)
        save_lora(model, tmp_path / precision)
    plain, quantized = (load_file(tmp_path / each / FILE_NAME) for each in ("unquantized", "nf4"))
    assert plain.keys() == quantized.keys() and all(torch.equal(plain[name], quantized[name]) for name in plain)
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_folder("sd3"))
    pipeline.load_lora_weights(tmp_path / "nf4")
    assert pipeline.get_active_adapters()


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_quantized_text_encoders_encode_nearly_the_same(precision):
    plain = FAMILIES["sd3"].load_text_encoders(tiny_folder("sd3")).encode(["a red fox"])
    model = FAMILIES["sd3"].load_text_encoders(tiny_folder("sd3"), precision=precision)
    assert all(quantized_paths(getattr(model.pipeline, name)) for name in model.text_encoders)
    for name, value in model.encode(["a red fox"]).positive.items():
        expected = plain.positive[name]
        error = float((value - expected).norm() / expected.norm())
        assert 0 < error < (0.02 if precision == "int8" else 0.4)


def test_random_weights_are_drawn_and_quantized_layer_by_layer():
    full = FAMILIES["sd3"].full_size()
    arguments = dict(load("sd3", "unquantized").transformer.config)
    tiny = replace(full, transformer=replace(full.transformer, arguments=arguments))
    family = replace(FAMILIES["sd3"], sizes={"tiny": tiny})
    built = [family.build_transformer(torch.bfloat16, "cpu", base=BaseWeights("nf4")) for _ in range(2)]
    assert quantized_paths(built[0]) == quantized_paths(load("sd3", "nf4").transformer)
    assert not any(value.is_meta for value in (*built[0].parameters(), *built[0].buffers()))
    weights = [each for each in built[0].modules() if isinstance(each, nn.Linear)]
    assert all(float(each.weight.detach().float().std()) > 0 for each in weights)
    assert {each.weight.dtype for each in weights} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("overrides", "noun"),
    [
        (["model.base=nf4"], "training.lora"),
        (["model.base=int4", "training.lora={rank: 2}"], "'nf4'"),
        (["model.encoder_base=fp8"], "'int8'"),
        (["sample.precision=fp8"], "training.lora"),
        (["sample.precision=fp8", *LORA, "model.base=nf4"], "nf4"),
        (["sample.precision=fp8", *LORA, "mode=colocated"], "colocated"),
        (["sample.precision=fp8", *LORA, "techniques.assist=both"], "assist"),
        (["techniques.tag=greedy", "sample.precision=fp8", *LORA], "sample.precision"),
        (["sample.precision=fp8", *LORA], "decoupled"),
        (["sample.precision=fp8", *LORA, "algorithm.options.stale=decoupled"], "weighted"),
    ],
)
def test_a_format_that_cannot_be_is_refused_in_one_line(overrides, noun):
    with pytest.raises(ConfigError, match=noun) as error:
        read_blueprint(read_recipe("demo", overrides))
    assert overrides[0].partition("=")[0] in str(error.value) and "\n" not in str(error.value)


def test_a_transformer_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="repeated blocks"):
        check_has_blocks(nn.Sequential(nn.Linear(2, 2)), "nf4")


def test_generators_alone_have_the_precision_of_samples():
    blueprint = read_blueprint(read_recipe("demo", ["sample.precision=fp8", *LORA, *WEIGHED]))
    recipe = blueprint.recipe
    assert place(recipe, Machine(cores=(0, 1)), Path()).trainer.duties == {"train"}
    formats = BaseWeights(recipe.generating_base, trains=False), BaseWeights(recipe.model.base)
    generator, trainer = (load_model(blueprint, "cpu", base=base) for base in formats)
    assert quantized_paths(generator.transformer) and not quantized_paths(trainer.transformer)
    assert weights_state(generator).keys() == weights_state(trainer).keys()


def test_an_evaluation_can_have_unquantized_weights_with_the_trained_adapters():
    overrides = ["model.base=nf4", *LORA, "evaluation.base=unquantized"]
    blueprint = read_blueprint(read_recipe("demo", overrides))
    model, parked = load_model(blueprint, "cpu"), load_for_evaluation(blueprint, "cpu")
    assert parked is not None
    nudge(model, 0.1, seed=2)
    expected = load_model(blueprint, "cpu", base=BaseWeights())
    load_weights(expected, weights_state(model))
    row = load_text_encoders(blueprint, "cpu").encode(["2024"])
    shown = held_out_pixels(blueprint, expected, [row], first=0)
    with parked.with_weights_of(model) as evaluated:
        assert torch.equal(held_out_pixels(blueprint, evaluated, [row], first=0), shown)
    assert not torch.equal(held_out_pixels(blueprint, model, [row], first=0), shown)
    for other in (["evaluation=off"], []):
        assert load_for_evaluation(read_blueprint(read_recipe("demo", [*overrides[:2], *other])), "cpu") is None


def test_the_demo_loads_with_a_quantized_base():
    blueprint = read_blueprint(read_recipe("demo", ["model.base=nf4", "training.lora={rank: 4}"]))
    model = load_model(blueprint, "cpu")
    assert quantized_paths(model.transformer) and model.dtype == torch.float32
