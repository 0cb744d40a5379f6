"""Wan2.2 A14B, a model with a transformer for high and one for low noise levels."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scored_groups import (
    Rollout,
    lively,
    nudge,
    relative_difference,
    scored_groups,
    serial_gradient,
    serial_of,
    trainer_of,
)
from tiny_wan_models import tiny_wan_a14b
from torch import Tensor

from digenrl.commands.export import export_run
from digenrl.commands.support.derived_facts import derive_facts
from digenrl.commands.support.model_probe import plain_pipeline
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.config.recipes.recipe import Recipe
from digenrl.config.recipes.training import TrainerSettings
from digenrl.config.recipes.windows import read_window
from digenrl.generation.windows import choose_steps
from digenrl.models.adapters.lora import adapter_parameters, add_lora
from digenrl.models.adapters.lora_files import FILE_NAME, FILE_NAME_2, save_lora
from digenrl.models.blocks import block_positions, checkpoint_blocks, repeated_blocks
from digenrl.models.contract import SampleSize
from digenrl.models.experts import EXPERTS, Experts
from digenrl.models.model_weights import weights_state
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.quantized.layers import QuantizedLinear
from digenrl.models.quantized.replacing import BaseWeights
from digenrl.models.registry import find_family
from digenrl.records import SampleId
from digenrl.run_folder.folder import RunFolder
from digenrl.testing.tiny_models import make_tiny_pipeline, seeded_weights, tiny_size
from digenrl.training.checkpoint.checkpoints import save_checkpoint
from digenrl.training.checkpoint.export import write_merged
from digenrl.training.trainer_state import OptimizerState, TrainerState
from digenrl.worker.checks.preflight import inspect_here

WAN = find_family("wan")
PROMPTS = ["a red cat", "two small dogs running through a field of yellow flowers"]
SIZE = SampleSize(32, 48, frames=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "wan_a14b"
    with seeded_weights(0):
        tiny_wan_a14b().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def shared(folder: Path) -> PipelineModel:
    """For tests that do not modify it."""
    return WAN.load(folder)


def mixed(model: PipelineModel) -> dict[str, Any]:
    """Four rows, of which the second and the third are above the boundary."""
    noise = torch.randn(4, *model.noise_shape(SIZE), generator=torch.Generator().manual_seed(3))
    times = torch.tensor([874.0, 875.0, 999.0, 120.0])
    text = model.encode([*PROMPTS, *reversed(PROMPTS)])
    return {"latents_BL": noise, "timesteps_B": times, "conditioning": text, "guidance": 4.0, "size": SIZE}


def experts_of(model: PipelineModel) -> Experts:
    assert isinstance(model.transformer, Experts)
    return model.transformer


@pytest.mark.parametrize(("guidance", "steps"), [(4.0, 7), (1.0, 7), (1.0, 1)])
@torch.no_grad()
def test_the_euler_loop_equals_the_pipeline_which_changes_its_transformer_at_the_boundary(
    shared: PipelineModel, guidance: float, steps: int
) -> None:
    noise = torch.randn(2, *shared.noise_shape(SIZE), generator=torch.Generator().manual_seed(3))
    latents, schedule, conditioning = noise, shared.schedule(steps, SIZE), shared.encode(PROMPTS)
    high = schedule.timesteps >= experts_of(shared).boundary
    assert high[0] and bool(high[-1]) == (steps == 1)
    for index, time in enumerate(schedule.timesteps):
        velocity = shared.velocity(latents, time.expand(2), conditioning, guidance, SIZE)
        latents = latents + (schedule.sigmas[index + 1] - schedule.sigmas[index]) * velocity
    pipeline = plain_pipeline(shared)
    size = {"height": SIZE.height, "width": SIZE.width, "num_frames": SIZE.frames}
    arguments = {"num_inference_steps": steps, "negative_prompt": ["", ""], "latents": noise, **size}
    theirs = pipeline(PROMPTS, output_type="latent", **arguments, **shared.pipeline_arguments(guidance)).frames
    torch.testing.assert_close(latents, theirs, atol=5e-6 if guidance > 1 else 0, rtol=0)


@torch.no_grad()
def test_each_row_of_a_mixed_pack_is_computed_by_its_expert_alone(shared: PipelineModel) -> None:
    batch, experts = mixed(shared), experts_of(shared)
    together = shared.velocity(**batch)
    for row, expert in enumerate(("transformer_2", "transformer", "transformer", "transformer_2")):
        single = find_family("wan").model_class(
            tiny_pipeline_with(shared, getattr(experts, expert))
        )  # as if it were the only transformer
        rows = slice(row, row + 1)
        alone = single.velocity(
            batch["latents_BL"][rows], batch["timesteps_B"][rows], batch["conditioning"].rows(rows), 4.0, SIZE
        )
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-5)


def tiny_pipeline_with(model: PipelineModel, transformer: Any) -> Any:
    parts = {**model.pipeline.components, "transformer": transformer, "transformer_2": None}
    return type(model.pipeline)(**parts)


@pytest.mark.parametrize("expert", ["high", "low", "both"])
@torch.no_grad()
def test_a_lora_of_each_expert_loads_where_diffusers_expects_it(expert: Any, folder: Path, tmp_path: Path) -> None:
    model = WAN.load(folder)
    batch = mixed(model)
    base = model.velocity(**batch)
    add_lora(model, rank=2, alpha=8, seed=0, expert=expert)
    nudge(model, 0.2, seed=1)
    assert {name.partition(".")[0] for name in weights_state(model)} == set(EXPERTS[expert])
    adapted = model.velocity(**batch)
    changed = (adapted != base).flatten(1).any(dim=1).tolist()
    assert (
        changed
        == {"high": [False, True, True, False], "low": [True, False, False, True], "both": [True] * 4}[expert]
    )
    save_lora(model, tmp_path / "lora")
    pipeline = WAN.pipeline_class.from_pretrained(folder)
    if expert != "low":
        pipeline.load_lora_weights(tmp_path / "lora", weight_name=FILE_NAME)
    if expert != "high":
        pipeline.load_lora_weights(tmp_path / "lora", weight_name=FILE_NAME_2, load_into_transformer_2=True)
    assert len(list((tmp_path / "lora").iterdir())) == (2 if expert == "both" else 1)
    assert torch.equal(WAN.model_class(pipeline).velocity(**batch), adapted)
    write_merged(model, tmp_path / "merged")
    torch.testing.assert_close(WAN.load(tmp_path / "merged").velocity(**batch), adapted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo", "diffusion_nft"])
def test_packed_training_of_both_experts_equals_training_term_by_term(name: str, folder: Path) -> None:
    model = WAN.load(folder, dtype=torch.float64)
    add_lora(model, rank=2, alpha=4, seed=3)
    nudge(model, 0.05, seed=4)
    algorithm = lively(name)
    rollout = Rollout(groups=2, group_size=3, steps=4, slice_size=3, guidance=1.0, size=tiny_size("wan"))
    groups = scored_groups(model, algorithm, rollout, [(0.0, 1.0, 3.0), (5.0, 2.0, 1.0)])
    serial = serial_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=3, gradient_checkpointing=1))
    nudge(model, 0.005, seed=9)
    checkpoint_blocks(model, 0)
    expected = serial_gradient(serial, groups)
    checkpoint_blocks(model, 1)
    for group in reversed(groups):
        trainer.add_group(group)
    gradient = trainer.gradient()
    assert relative_difference(gradient, expected) < 1e-6
    reached = {path.partition(".")[0] for path, value in gradient.items() if value.abs().max() > 0}
    assert reached == set(EXPERTS["both"])


def test_a_checkpointed_position_is_checkpointed_in_both_experts(folder: Path) -> None:
    model = WAN.load(folder)
    add_lora(model, rank=2, alpha=4, seed=0)
    positions, blocks = block_positions(model.transformer), repeated_blocks(model.transformer)
    assert [len(position) for position in positions] == [2, 2] and len(blocks) == 4
    runs = dict.fromkeys(blocks, 0)
    for block in blocks:
        block.register_forward_pre_hook(lambda module, _: runs.__setitem__(module, runs[module] + 1))
    checkpoint_blocks(model, 1)
    model.velocity(**mixed(model)).square().mean().backward()
    assert [[runs[block] for block in position] for position in positions] == [[2, 2], [1, 1]]


def test_both_experts_are_quantized(folder: Path) -> None:
    model = WAN.load(folder, base=BaseWeights("int8"))
    layers = [path for path, layer in model.transformer.named_modules() if isinstance(layer, QuantizedLinear)]
    assert {path.partition(".")[0] for path in layers} == set(EXPERTS["both"])
    assert torch.isfinite(model.velocity(**mixed(model))).all()


def test_text_encoders_load_without_any_transformer(folder: Path) -> None:
    model = WAN.load_text_encoders(folder)
    assert model.transformer is None and model.pipeline.transformer_2 is None
    assert len(model.encode(PROMPTS)) == 2


# --- Recipes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expert", "files"), [("high", ["run_high_noise"]), ("both", ["run_high_noise", "run_low_noise"])]
)
def test_comfyui_gets_a_file_for_each_adapted_expert(
    expert: Any, files: list[str], folder: Path, tmp_path: Path
) -> None:
    model = WAN.load(folder)
    add_lora(model, rank=64, alpha=128, seed=0, expert=expert)
    nudge(model, 0.2, seed=1)
    weights = {name: each.detach() for name, each in model.transformer.named_parameters() if ".lora_" in name}
    settings = recipe(folder, f"model.train_expert={expert}")
    run = RunFolder.create(tmp_path / "run", settings, datetime.now(UTC))
    save_checkpoint(run.checkpoints, 1, TrainerState(1, 1, None, weights, OptimizerState({}, {})), {})
    exported = export_run(run.path, "comfyui", None, tmp_path / "comfyui")
    assert exported.files == tuple(f"{file}.safetensors" for file in files)
    assert ("high-noise" in exported.loading[0]) == (expert == "high")
    for file, part in zip(files, EXPERTS[expert], strict=True):
        written, own = load_file(tmp_path / "comfyui" / f"{file}.safetensors"), weights_state(model)
        name, ours = "diffusion_model.blocks.1.cross_attn.v", f"{part}.blocks.1.attn2.to_v"
        assert torch.equal(written[f"{name}.lora_A.weight"], own[f"{ours}.lora_A.weight"])
        assert torch.equal(written[f"{name}.lora_B.weight"], 2 * own[f"{ours}.lora_B.weight"])


def recipe(source: str | Path, *changes: str) -> Recipe:
    return read_recipe("wan_2_2_a14b_flow_grpo", [f"model.source={source}", *changes])


def test_the_plan_counts_the_weights_of_both_and_the_work_of_one(folder: Path, tmp_path: Path) -> None:
    make_tiny_pipeline("wan", tmp_path / "wan")
    small = "sample.height=32", "sample.width=32"
    both, single = (derive_facts(recipe(source, *small)) for source in (folder, tmp_path / "wan"))
    assert both.parameters == 2 * single.parameters and both.block_weights == 2 * single.block_weights
    assert both.parameters == sum(weight.numel() for weight in WAN.load(folder).transformer.parameters())
    assert both.lora_linears == 2 * single.lora_linears
    for fact in ("blocks", "image_weights", "text_weights", "hidden", "eager", "compiled"):
        assert getattr(both, fact) == getattr(single, fact), fact


@pytest.mark.parametrize(
    ("changes", "key", "noun"),
    [
        (("training.lora=null", "model.dtype=float32"), "training.lora", "adapters"),
        (("lanes.shard_base=true", "lanes.ranks=2"), "lanes.shard_base", "whole"),
        (("model.train_expert=low",), "model.train_expert", "step 1"),
        (("model.train_expert=high", "sample.window={kind: all}"), "model.train_expert", "step 5"),
    ],
)
def test_what_does_not_suit_two_transformers_is_refused_before_anything_is_loaded(
    changes: tuple[str, ...], key: str, noun: str
) -> None:
    with pytest.raises(ConfigError, match=noun) as error:
        inspect_here(recipe("random:2.2-a14b", *changes))
    assert str(error.value).partition(":")[0].endswith(key) and "\n" not in str(error.value)


def test_a_window_after_the_boundary_trains_the_expert_for_low_noise(folder: Path) -> None:
    inspect_here(recipe(folder, "model.train_expert=low", "sample.window={kind: sparse, skip: 5, fraction: 0.9}"))
    inspect_here(recipe(folder, "model.train_expert=high"))


@pytest.mark.parametrize(
    "window",
    [
        {"kind": "all", "fraction": 0.6},
        {"kind": "random_subset"},
        {"kind": "sliding", "width": 3, "training_steps_per_shift": 1},
        {"kind": "fast", "width": 2},
        {"kind": "sparse", "count": 2, "skip": 3, "fraction": 0.8},
    ],
)
def test_a_window_says_which_steps_it_may_train(window: dict[str, Any]) -> None:
    chosen = read_window(window)
    samples = [SampleId(step, group, index=0) for step in range(20) for group in range(10)]
    kept = {index for sample in samples for index in choose_steps(chosen, 10, 7, sample).kept}
    assert kept == set(chosen.trainable_steps(10))


def test_an_expert_cannot_be_chosen_of_one_transformer() -> None:
    with pytest.raises(ConfigError, match=r"model\.train_expert: high.*one transformer"):
        inspect_here(recipe("random:2.1-14b", "model.train_expert=high"))


def test_a_pipeline_that_lacks_one_of_its_transformers_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "a14b")
    path = tmp_path / "a14b" / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "transformer_2": [None, None]}))
    with pytest.raises(ConfigError, match="without transformer_2"):
        inspect_here(recipe(tmp_path / "a14b"))


def test_adapters_have_the_names_of_their_components(folder: Path) -> None:
    model = WAN.load(folder)
    add_lora(model, rank=2, alpha=4, seed=0)
    values: dict[str, Tensor] = dict(adapter_parameters(model))
    assert sum(name.startswith("transformer_2.blocks.") for name in values) == len(values) / 2
