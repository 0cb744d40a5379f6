"""The contract of every registered model family, tested on its tiny pipeline against the diffusers pipeline.

A family is covered by being registered.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from host_visits import HostVisits
from rounding import assert_same
from source_pictures import encoded, pictures_for
from tiny_pipelines import shared_tiny_model, tiny_folder, tiny_model, with_own_transformer
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.models.adapters.lora import (
    adapter_parameters,
    adapters_disabled,
    add_lora,
)
from digenrl.models.adapters.lora_files import save_lora
from digenrl.models.blocks import checkpoint_blocks, repeated_blocks
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize, Schedule
from digenrl.models.families.qwen_image_2_1 import on_white
from digenrl.models.family import Component, Family, FullSize
from digenrl.models.loading.sources import ModelSource
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.registry import FAMILIES, find_family
from digenrl.testing.tiny_models import TINY_MODELS, make_tiny_pipeline, tiny_size
from digenrl.worker.blueprint import check_adapters, read_blueprint

PROMPTS = ["a red cat", "a sign that says hello"]
STEPS = 3
# The first family of each method that computes a schedule, and of each class of VAEs.
ONE_PER_SCHEDULE = list({each.model_class.schedule: name for name, each in reversed(FAMILIES.items())}.values())
ONE_PER_VAE = list({each.vae.cls: name for name, each in reversed(FAMILIES.items())}.values())
PADDING_COUNTS = ("qwen_image_2_1",)  # pipelines in which a prompt depends on longer ones beside it
LARGE_IN_MB = {"hunyuan_video_1_5": 28, "hunyuan_video_1_5_i2v": 28, "ltx2": 8}  # with layers of a fixed width


@pytest.fixture(scope="module", autouse=True)
def small_sources() -> Iterator[None]:
    """The pipeline of Qwen-Image-Edit resizes source images to a fixed area; here it keeps 32 x 64 pixels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edit_plus, "VAE_IMAGE_SIZE", 32 * 48)
        patch.setattr(edit_plus, "CONDITION_IMAGE_SIZE", 64 * 64)
        yield


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def directory(family: Family) -> Path:
    return tiny_folder(family.name)


@pytest.fixture(scope="module")
def shared_model(family: Family) -> DiffusionModel:
    """For tests that do not modify it."""
    return shared_tiny_model(family.name)


@pytest.fixture
def model(family: Family) -> DiffusionModel:
    """For tests that modify it."""
    return tiny_model(family.name)


@pytest.fixture(scope="module")
def rounded_model(family: Family, directory: Path) -> DiffusionModel:
    """In bf16 and without text encoders, for tests that do not modify it."""
    return family.load(directory, torch.bfloat16, text_encoders=False)


@pytest.fixture(scope="module")
def pipeline(family: Family, directory: Path, shared_model: PipelineModel) -> Any:
    return diffusers_pipeline(family, directory, shared_model, torch.float32)


def diffusers_pipeline(family: Family, directory: Path, shared_model: PipelineModel, dtype: torch.dtype) -> Any:
    """As diffusers loads it."""
    ours = dict.fromkeys(shared_model.unused_components)
    pipeline = family.pipeline_class.from_pretrained(directory, dtype=dtype, **ours)
    vars(pipeline).update(shared_model.own_components())
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = shared_model.pipeline_scheduler()
    if hasattr(pipeline, "tokenizer_2_max_length"):  # of glyphs, of which these prompts have none
        pipeline.tokenizer_2_max_length = 16
    return pipeline


@cache
def conditioning_of(family: str, size: SampleSize, *prompts: str) -> Conditioning:
    return encoded(shared_tiny_model(family), list(prompts), size)


def guidance_of(family: Family) -> float:
    """The default, or a guidance that has an effect."""
    return family.default_guidance if family.default_guidance > 1 else 4.0


def oblong(family: Family) -> SampleSize:
    """Not square, so that swapping height and width is noticed."""
    tiny = tiny_size(family.name)
    return SampleSize(tiny.height, tiny.width + tiny.height // 2, tiny.frames)


def noise_of(model: DiffusionModel, size: SampleSize, rows: int = 2, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *model.noise_shape(size), generator=generator)


@torch.no_grad()
def euler_loop(
    model: DiffusionModel,
    latents: Tensor,
    conditioning: Conditioning,
    guidance: float,
    size: SampleSize,
    steps: int = STEPS,
) -> Tensor:
    schedule = model.schedule(steps, size)
    latents = latents * schedule.noise_scale
    for i, time in enumerate(schedule.timesteps):
        velocity = model.velocity(latents, time.expand(len(latents)), conditioning, guidance, size)
        latents = latents + (schedule.sigmas[i + 1] - schedule.sigmas[i]) * velocity
    return latents


def batches(family: Family) -> list[slice]:
    """The rows that are generated together.

    Pipelines that edit images take one prompt at a time. Others count padding as text.
    """
    alone = family.sources.most > 0 or family.name in PADDING_COUNTS
    return [slice(row, row + 1) for row in range(len(PROMPTS))] if alone else [slice(None)]


def our_latents(model: PipelineModel, family: Family, guidance: float, steps: int = STEPS) -> Tensor:
    size = oblong(family)
    latents, conditioning = (
        model.initial_latents(noise_of(model, size), size),
        conditioning_of(family.name, size, *PROMPTS),
    )
    parts = [
        euler_loop(model, latents[row], conditioning.rows(row), guidance, size, steps) for row in batches(family)
    ]
    return torch.cat(parts)


def call_pipeline(
    pipeline: Any,
    family: Family,
    model: PipelineModel,
    guidance: float,
    output_type: str,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The output of the family's diffusers pipeline from the same noise. Edits are made one by one."""
    size = oblong(family)
    model.prepare_pipeline(pipeline, guidance, size)
    latents = model.initial_latents(noise_of(model, size), size).to(dtype)
    frames = {"num_frames": size.frames} if family.kind == "video" else {}
    sources = pictures_for(model, PROMPTS)
    answers: list[Tensor] = []
    for row in batches(family):
        prompts = PROMPTS[row]
        negatives = model.negative_arguments([""] * len(prompts)) if family.uses_negative_prompts else {}
        images = model.source_arguments(sources[row][0], size) if family.sources.most else {}
        answers += pipeline(
            prompt=list(prompts),  # some pipelines modify it
            num_inference_steps=steps,
            output_type=output_type,
            return_dict=False,
            **frames,
            **negatives,
            **images,
            **model.sample_arguments(latents[row], size),
            **model.pipeline_arguments(guidance),
        )[0]
    return torch.stack(answers)


def shake_adapters(model: DiffusionModel) -> None:
    generator = torch.Generator().manual_seed(5)
    state = {name: torch.randn(v.shape, generator=generator) * 0.1 for name, v in weights_state(model).items()}
    load_weights(model, state)


def mixed_batch(model: PipelineModel, size: SampleSize) -> tuple[Tensor, Tensor, Conditioning, Schedule]:
    """Three rows at three different timesteps."""
    schedule = model.schedule(STEPS, size)
    latents = model.initial_latents(noise_of(model, size, rows=3), size)
    return (
        latents,
        schedule.timesteps[[2, 0, 1]],
        conditioning_of(model.family, size, *PROMPTS, "two dogs"),
        schedule,
    )


def assert_latents_equal(family: Family, pipeline: Any, model: PipelineModel, guidance: float, steps: int) -> None:
    """Bitwise where forwards have the pipeline's shapes. The pipeline of Wan runs its branches separately, that of
    Z-Image together, and those of Qwen-Image and HunyuanVideo keep padding. We rotate in real numbers in
    Qwen-Image. Some CPUs round products of other
    shapes differently. The latents of UNets are scaled, in their pipelines by other factors."""
    tolerance = 0.0 if family.name in ("sd3", "flux", "flux_kontext", "flux2_klein", "flux2_dev") else 5e-6
    size = oblong(family)
    theirs = call_pipeline(pipeline, family, model, guidance, "latent", steps)
    latents = model.initial_latents(noise_of(model, size), size)
    ours = model.pipeline_latents(our_latents(model, family, guidance, steps), size)
    assert torch.isfinite(ours).all()
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(1.0, float(theirs.abs().max())))
    assert not torch.equal(ours, model.pipeline_latents(latents, size))
    schedule = model.schedule(steps, size)
    if hasattr(pipeline.scheduler, "sigmas"):
        assert torch.equal(schedule.sigmas, pipeline.scheduler.sigmas)
    assert torch.equal(schedule.timesteps, pipeline.scheduler.timesteps.float())


def fewest_steps(pipeline: Any) -> int:
    """One, or two where diffusers divides 0 by 0 with one."""
    return 1 if pipeline.scheduler.config.get("shift_terminal") is None else 2


def test_guided_steps_equal_the_diffusers_pipeline(
    family: Family, pipeline: Any, shared_model: PipelineModel
) -> None:
    assert_latents_equal(family, pipeline, shared_model, guidance_of(family), steps=2)


def test_the_fewest_steps_without_guidance_equal_the_diffusers_pipeline(
    family: Family, pipeline: Any, shared_model: PipelineModel
) -> None:
    assert_latents_equal(family, pipeline, shared_model, 1.0, fewest_steps(pipeline))


@contextmanager
def embedded_values() -> Iterator[set[float]]:
    """The values that are embedded as sinusoids inside: timesteps and guidance."""
    found: set[float] = set()

    def note(module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        if type(module).__name__ in ("Timesteps", "TimestepEmbedder"):
            found.update(given[0].flatten().tolist())

    handle = register_module_forward_pre_hook(note)
    yield found
    handle.remove()


def test_in_bf16_timesteps_and_guidance_are_rounded_as_in_the_diffusers_pipeline(
    family: Family, directory: Path
) -> None:
    model = shared_tiny_model(family.name, torch.bfloat16)
    pipeline = diffusers_pipeline(family, directory, model, torch.bfloat16)
    with embedded_values() as theirs:
        call_pipeline(pipeline, family, model, guidance_of(family), "latent", dtype=torch.bfloat16)
    with embedded_values() as ours:
        our_latents(model, family, guidance_of(family))
    assert ours == theirs


@torch.no_grad()
def test_in_bf16_branches_are_combined_in_the_precision_of_the_diffusers_pipeline(
    family: Family, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, guidance, size = shared_tiny_model(family.name, torch.bfloat16), guidance_of(family), oblong(family)
    pipeline, rounded = diffusers_pipeline(family, directory, model, torch.bfloat16), set()
    kind, step = type(pipeline.scheduler), type(pipeline.scheduler).step

    def watched(scheduler: Any, predicted: Tensor, *arguments: Any, **named: Any) -> Any:
        rounded.add(predicted.dtype == torch.bfloat16)
        return step(scheduler, predicted, *arguments, **named)

    monkeypatch.setattr(kind, "step", watched)
    call_pipeline(pipeline, family, model, guidance, "latent", dtype=torch.bfloat16)
    row, schedule = batches(family)[0], model.schedule(STEPS, size)
    latents = (model.initial_latents(noise_of(model, size), size) * schedule.noise_scale)[row]
    times, conditioning = schedule.timesteps[1].expand(len(latents)), conditioning_of(family.name, size, *PROMPTS)
    velocity = model.velocity(latents, times, conditioning.rows(row), guidance, size)
    # A UNet predicts noise.
    predicted = velocity if family.denoiser == "transformer" else latents + (1 - schedule.sigmas[1]) * velocity
    error = (predicted - predicted.bfloat16()).abs()
    assert {bool((error <= 1e-4 * predicted.abs()).all())} == rounded


@pytest.mark.parametrize("family", ONE_PER_SCHEDULE, indirect=True)
def test_many_steps_equal_the_diffusers_pipeline(
    family: Family, pipeline: Any, shared_model: PipelineModel
) -> None:
    assert_latents_equal(family, pipeline, shared_model, 1.0, steps=8)


def test_a_schedule_decreases_to_zero_and_does_not_depend_on_earlier_calls(
    family: Family, shared_model: DiffusionModel
) -> None:
    size = tiny_size(family.name)
    first = shared_model.schedule(STEPS, size)
    shared_model.schedule(STEPS + 4, size)
    again = shared_model.schedule(STEPS, size)
    assert torch.equal(first.sigmas, again.sigmas) and torch.equal(first.timesteps, again.timesteps)
    assert first.sigmas.dtype == first.timesteps.dtype == torch.float32
    assert first.steps == STEPS and len(first.sigmas) == STEPS + 1
    assert (first.sigmas.diff() < 0).all() and first.sigmas[-1] == 0


@torch.no_grad()
def test_rows_of_a_mixed_time_batch_are_independent(family: Family, shared_model: DiffusionModel) -> None:
    """With guidance: a forward without it is a part of one with it."""
    model, size, guidance = shared_model, oblong(family), guidance_of(family)
    latents, times, conditioning, schedule = mixed_batch(model, size)
    together = model.velocity(latents, times, conditioning, guidance, size)
    other_latents, other_times = latents.clone(), times.clone()
    other_latents[1], other_times[1] = other_latents[1] * 2 + 1, schedule.timesteps[2]
    changed = model.velocity(other_latents, other_times, conditioning, guidance, size)
    assert torch.equal(changed[[0, 2]], together[[0, 2]])
    assert not torch.equal(changed[1], together[1])
    for row in range(3):
        alone = model.velocity(
            latents[row : row + 1], times[row : row + 1], conditioning.rows(slice(row, row + 1)), guidance, size
        )
        torch.testing.assert_close(alone[0], together[row], atol=3e-5, rtol=1e-5)


@torch.no_grad()
def test_time_prompt_and_guidance_each_change_the_velocity(family: Family, shared_model: DiffusionModel) -> None:
    model, size, guidance = shared_model, tiny_size(family.name), guidance_of(family)
    latents, times, conditioning, _ = mixed_batch(model, size)
    velocity = model.velocity(latents, times, conditioning, guidance, size)
    turned = torch.tensor([1, 2, 0])
    assert velocity.shape == latents.shape and velocity.dtype == torch.float32
    assert not torch.equal(model.velocity(latents, times[turned], conditioning, guidance, size), velocity)
    assert not torch.equal(model.velocity(latents, times, conditioning.rows(turned), guidance, size), velocity)
    assert not torch.equal(model.velocity(latents, times, conditioning, 1.0, size), velocity)


@torch.no_grad()
def test_only_guidance_above_one_needs_negative_rows(family: Family, shared_model: DiffusionModel) -> None:
    model, size = shared_model, tiny_size(family.name)
    latents, times, conditioning, _ = mixed_batch(model, size)
    positive_only = replace(conditioning, negative=None)
    off = model.velocity(latents, times, positive_only, 1.0, size)
    assert torch.equal(off, model.velocity(latents, times, conditioning, 1.0, size))
    if family.uses_negative_prompts:
        assert torch.equal(off, model.velocity(latents, times, positive_only, 0.0, size))
        with pytest.raises(ValueError, match="unconditional"):
            model.velocity(latents, times, positive_only, guidance_of(family), size)
    else:
        guided = model.velocity(latents, times, positive_only, guidance_of(family), size)
        assert torch.equal(guided, model.velocity(latents, times, conditioning, guidance_of(family), size))


def test_a_prompt_is_encoded_the_same_in_any_batch(family: Family, shared_model: DiffusionModel) -> None:
    together, alone = shared_model.encode(PROMPTS), shared_model.encode(PROMPTS[:1])
    assert len(together) == 2 and (together.negative is not None) == family.uses_negative_prompts
    sides = [(alone.positive, together.positive)]
    if together.negative is not None and alone.negative is not None:
        sides.append((alone.negative, together.negative))
    for one, both in sides:
        assert one.keys() == both.keys()
        for name, value in one.items():
            other = both[name]
            assert (value is None) == (other is None), name
            if value is not None and other is not None:
                assert not value.requires_grad
                torch.testing.assert_close(value[0], other[0], atol=1e-5, rtol=1e-5)


def test_decoding_equals_the_diffusers_pipeline(
    family: Family, pipeline: Any, shared_model: DiffusionModel
) -> None:
    model, size, steps = shared_model, oblong(family), fewest_steps(pipeline)
    theirs = call_pipeline(pipeline, family, model, 1.0, "pt", steps)
    theirs = theirs if family.kind == "video" else theirs.unsqueeze(1)
    if theirs.shape[2] == 4:  # with an opacity
        theirs = theirs[:, :, :3] * theirs[:, :, 3:] + 1 - theirs[:, :, 3:]
    ours = model.decode(our_latents(model, family, 1.0, steps), size)
    assert ours.shape == (2, size.frames, 3, size.height, size.width)
    assert ours.dtype == torch.float32 and 0 <= float(ours.min()) < float(ours.max()) <= 1
    torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=0)


def gradient_of(model: DiffusionModel, family: Family) -> dict[str, Tensor | None]:
    latents, times, conditioning, _ = mixed_batch(model, tiny_size(family.name))
    velocity = model.velocity(latents, times, conditioning, guidance_of(family), tiny_size(family.name))
    model.transformer.zero_grad(set_to_none=True)
    velocity.square().mean().backward()
    return {name: parameter.grad for name, parameter in adapter_parameters(model).items()}


def any_gradient(output: Tensor | tuple[Tensor | None, ...]) -> bool:
    parts = output if isinstance(output, tuple) else (output,)
    return any(each.requires_grad for each in parts if each is not None)


@torch.no_grad()
def test_given_images_become_the_latents_that_the_vae_decodes(family: Family, shared_model: PipelineModel) -> None:
    size = oblong(family)
    pixels_BFCHW = torch.rand(2, 1, 3, size.height, size.width, generator=torch.Generator().manual_seed(0))
    if family.kind == "video":
        with pytest.raises(ConfigError, match=family.name):
            shared_model.encode_pixels(pixels_BFCHW)
        return
    vae, inputs_BCFHW = shared_model.vae, 2 * pixels_BFCHW.transpose(1, 2) - 1
    if family.name == "qwen_image_2_1":  # with opacity
        inputs_BCFHW = torch.cat([inputs_BCFHW, torch.ones_like(inputs_BCFHW[:, :1])], dim=1)
    inputs = inputs_BCFHW if "z_dim" in vae.config else inputs_BCFHW.squeeze(2)
    decoded = vae.decode(vae.encode(inputs).latent_dist.mode()).sample.reshape(inputs_BCFHW.shape)
    latents_BL = shared_model.encode_pixels(pixels_BFCHW)
    assert latents_BL.shape == shared_model.initial_latents(noise_of(shared_model, size), size).shape
    expected_BFCHW = (decoded.transpose(1, 2) / 2 + 0.5).clamp(0, 1)
    if family.name == "qwen_image_2_1":
        expected_BFCHW = on_white(expected_BFCHW)
    torch.testing.assert_close(shared_model.decode(latents_BL, size), expected_BFCHW, rtol=0, atol=1e-4)
    assert expected_BFCHW.std() > 1e-3


def test_checkpointing_blocks_does_not_change_the_gradient(family: Family, model: DiffusionModel) -> None:
    add_lora(model, rank=2, alpha=4, seed=0)
    shake_adapters(model)
    blocks = repeated_blocks(model.transformer)
    runs, trained = [0] * len(blocks), [False] * len(blocks)
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, index=index: runs.__setitem__(index, runs[index] + 1))
        block.register_forward_hook(
            lambda *given, index=index: trained.__setitem__(index, any_gradient(given[-1]) or trained[index])
        )

    def runs_and_gradient(checkpointed: int) -> tuple[list[int], dict[str, Tensor | None]]:
        runs[:] = [0] * len(blocks)
        checkpoint_blocks(model, checkpointed)
        gradient = gradient_of(model, family)
        return list(runs), gradient

    checkpointed = {count: runs_and_gradient(count) for count in (1, len(blocks))}
    once, plain = runs_and_gradient(0)
    assert len(set(once)) == 1
    assert trained.count(False) <= 1  # the first convolutions of a UNet precede all adapters
    assert sum(bool(each.abs().max() > 0) for each in plain.values() if each is not None) > len(plain) / 2
    for count, (repeated, gradient) in checkpointed.items():
        again = [needed and index < count for index, needed in enumerate(trained)]
        assert repeated == [2 * forwards if each else forwards for each, forwards in zip(again, once, strict=True)]
        assert plain.keys() == gradient.keys()
        for name, expected in plain.items():
            got = gradient[name]
            assert (expected is None) == (got is None), name
            assert expected is None or got is None or torch.equal(got, expected), name


def test_an_fp64_model_computes_velocity_and_gradient_in_fp64(
    family: Family, directory: Path, shared_model: DiffusionModel
) -> None:
    model = family.load(directory, torch.float64, "cpu", text_encoders=False)
    add_lora(model, rank=2, alpha=4, seed=0)
    latents, times, conditioning, _ = mixed_batch(model, tiny_size(family.name))
    given = (guidance_of(family), tiny_size(family.name))
    velocity = model.velocity(latents, times, conditioning.to("cpu", torch.float64), *given)
    single = shared_model.velocity(latents, times, conditioning, *given)
    assert velocity.dtype == torch.float64
    torch.testing.assert_close(velocity.float(), single, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_dtype_is_that_of_most_weights_and_follows_them(rounded_model: PipelineModel) -> None:
    model = with_own_transformer(rounded_model)
    assert model.dtype == torch.bfloat16
    add_lora(model, rank=2, alpha=4, seed=0)
    assert model.dtype == torch.bfloat16 and weights_state(model).popitem()[1].dtype == torch.float32
    model.transformer.to(torch.float64)
    assert model.dtype == torch.float64


@torch.no_grad()
def test_a_forward_does_not_walk_all_modules_on_the_host(
    family: Family, model: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_lora(model, rank=2, alpha=4, seed=0)
    size = tiny_size(family.name)
    conditioning = model.compact(conditioning_of(family.name, size, PROMPTS[0]))
    latents, times = model.initial_latents(noise_of(model, size, rows=1), size), torch.tensor([500.0])
    expected = model.rollout_velocity(latents, times, conditioning, guidance_of(family), size)
    walks: list[str] = []
    walk = torch.nn.Module.named_modules

    def watched(module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        if module is model.transformer:
            walks.append("".join(traceback.format_stack(limit=4)))
        return walk(module, *arguments, **named)

    monkeypatch.setattr(torch.nn.Module, "named_modules", watched)
    again = model.rollout_velocity(latents, times, conditioning, guidance_of(family), size)
    assert torch.equal(again, expected)
    assert not walks, walks[0]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one length", "two lengths"])
@torch.no_grad()
def test_no_forward_after_the_first_reads_values_on_the_host(
    family: Family, model: DiffusionModel, prompts: list[str]
) -> None:
    """CUDA graphs need this. On the meta device, reading a value on the host is an error.

    With guidance: a forward without it is a part of one with it.
    """
    if len(prompts) > 1 and family.name == "z_image":
        pytest.skip("diffusers' transformer takes a list of texts without padding")
    add_lora(model, rank=2, alpha=4, seed=0)
    size = tiny_size(family.name)
    conditioning = model.compact(conditioning_of(family.name, size, *prompts)).to("meta")
    latents = model.initial_latents(noise_of(model, size, rows=len(prompts)), size).to("meta")
    times = torch.full((len(prompts),), 500.0).to("meta")
    model.transformer.to("meta")
    model.velocity(latents, times, conditioning, guidance_of(family), size)
    with HostVisits() as seen:
        model.velocity(latents, times, conditioning, guidance_of(family), size)
    assert not seen.found, seen.found[0]


@torch.no_grad()
def test_disabling_the_adapters_gives_exactly_the_base(family: Family, model: DiffusionModel) -> None:
    size, guidance = tiny_size(family.name), guidance_of(family)
    latents, times, conditioning, _ = mixed_batch(model, size)
    base = model.velocity(latents, times, conditioning, guidance, size)
    add_lora(model, rank=2, alpha=4, seed=0)
    shake_adapters(model)
    assert not torch.equal(model.velocity(latents, times, conditioning, guidance, size), base)
    with adapters_disabled(model):
        assert_same(model.velocity(latents, times, conditioning, guidance, size), base)


def test_full_sizes_have_the_published_number_of_parameters_and_lack_only_text_encoders(
    family: Family, shared_model: DiffusionModel
) -> None:
    model = family.build_full(torch.bfloat16, "meta")
    default, *others = family.sizes
    transformers = {name: family.build_transformer(torch.bfloat16, "meta", name) for name in others}
    for name, transformer in {default: model.transformer, **transformers}.items():
        count = sum(parameter.numel() for parameter in transformer.parameters())
        assert round(count / 1e9, 2) == family.sizes[name].billions, name
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ConfigError, match="unknown size"):
        family.build_transformer(torch.bfloat16, "meta", "9000B")
    conditioning = family.random_conditioning(2, torch.bfloat16, "meta", seed=0)
    real = conditioning_of(family.name, oblong(family), *PROMPTS)
    assert model.vae.dtype == torch.float32
    assert model.family == family.name and model.schedule(4, tiny_size(family.name)).steps == 4
    assert model.noise_shape(tiny_size(family.name)) == shared_model.noise_shape(tiny_size(family.name))
    assert len(conditioning) == 2
    assert conditioning.positive.keys() == real.positive.keys() - {"glyphs"}  # random texts have none
    assert (conditioning.negative is None) == (real.negative is None)
    with pytest.raises(RuntimeError, match="text encoders"):
        model.encode(PROMPTS)


def test_random_weights_have_the_dtypes_of_loaded_ones(
    family: Family, shared_model: PipelineModel, rounded_model: PipelineModel
) -> None:
    tiny = shared_model.transformer
    size = FullSize(0.0, Component(type(tiny), dict(tiny.config)), text_shapes={})
    for loaded in (rounded_model, shared_model):
        random = replace(family, sizes={"tiny": size}).build_transformer(loaded.dtype, "cpu")
        expected = {name: weight.dtype for name, weight in loaded.transformer.named_parameters()}
        assert {name: weight.dtype for name, weight in random.named_parameters()} == expected
    if family.name == "wan":
        time_embedder = rounded_model.transformer.condition_embedder.time_embedder
        assert time_embedder.linear_1.weight.dtype == torch.float32


@pytest.mark.parametrize("family", ONE_PER_VAE, indirect=True)
def test_the_vae_is_in_fp32_unless_told_otherwise(
    family: Family, directory: Path, shared_model: PipelineModel, rounded_model: PipelineModel
) -> None:
    model, size = rounded_model, tiny_size(family.name)
    assert model.vae.dtype == torch.float32 and model.dtype == torch.bfloat16
    latents = model.initial_latents(noise_of(model, size, rows=1), size)
    exact = shared_model.decode(latents, size)
    assert torch.equal(model.decode(latents, size), exact)
    coarse = family.load(directory, torch.bfloat16, text_encoders=False, vae_dtype=torch.bfloat16)
    assert coarse.vae.dtype == torch.bfloat16 and not torch.equal(coarse.decode(latents, size), exact)


def test_texts_are_padded_and_cut_to_the_length_that_is_set(
    family: Family, directory: Path, shared_model: PipelineModel
) -> None:
    length = family.model_class.text_length
    if length is None:
        with pytest.raises(ConfigError, match="fixed length"):
            family.check_text_tokens(20)
        return
    model = family.load_text_encoders(directory, text_tokens=5)
    assert model.text_tokens == 5
    default = shared_model.encode(PROMPTS).positive
    name = next(name for name, value in default.items() if value is not None and value.ndim == 3)
    fixed = default[name].shape[1] - shared_model.text_tokens
    for tokens in (5, 16):
        model.set_text_tokens(tokens)
        for prompt in ("cat", "a red cat and two dogs " * 20):
            text = model.encode([prompt])
            for side in (text.positive, text.negative or text.positive):
                lengths = {value.shape[1] for value in side.values() if value is not None and value.ndim == 3}
                assert lengths == {tokens + fixed}
    most = length.most
    with pytest.raises(ConfigError, match=rf"model\.text_tokens: {most + 1} .*{most}"):
        family.check_text_tokens(most + 1)
    assert not _is_allowed(partial(model.set_text_tokens, most + 1))
    for tokens in (48, 49, 96, 97, most):  # around the lengths that tiny tokenizers allow
        allowed = _is_allowed(partial(model.set_text_tokens, tokens))
        assert _is_allowed(partial(family.check_tokenizer, tokens, ModelSource.of(directory))) == allowed


def _is_allowed(check: Callable[[], None]) -> bool:
    try:
        check()
    except ConfigError as error:
        assert "tokenizer" in str(error)
        return False
    return True


@pytest.mark.parametrize(
    "family", [each for each in map(find_family, FAMILIES) if each.sources.most], ids=lambda each: each.name
)
def test_random_source_images_have_the_shapes_of_every_full_size(family: Family) -> None:
    size = SampleSize(64, 64, frames=5 if family.kind == "video" else 1)
    for name in family.sizes:
        images = family.random_images([SampleSize(64, 64)], size, torch.bfloat16, 0, name)
        assert images and all(each.shape[0] == 1 and each.dtype == torch.bfloat16 for each in images.values())


def test_random_texts_have_the_length_that_is_set(family: Family) -> None:
    if family.model_class.text_length is None:
        return
    default = family.random_conditioning(1, torch.float32, "cpu", seed=0)
    shorter = family.random_conditioning(
        1, torch.float32, "cpu", seed=0, text_tokens=family.model_class.text_length.default - 100
    )
    for name, value in default.positive.items():
        by = 100 if value.ndim == 3 or "mask" in name else 0
        assert shorter.positive[name].shape == (1, value.shape[1] - by, *value.shape[2:])


def test_encoding_without_text_encoders_raises(model: DiffusionModel, rounded_model: DiffusionModel) -> None:
    model.drop_text_encoders()
    with pytest.raises(RuntimeError, match="text encoders"):
        model.encode(PROMPTS)
    with pytest.raises(RuntimeError, match="text encoders"):
        rounded_model.encode(PROMPTS)


def test_a_size_that_does_not_divide_into_patches_is_refused(family: Family, shared_model: DiffusionModel) -> None:
    tiny = tiny_size(family.name)
    for size in (SampleSize(tiny.height + 8, tiny.width, tiny.frames), SampleSize(0, tiny.width, tiny.frames)):
        with pytest.raises(ValueError, match=r"multiples of (16|32)"):
            shared_model.noise_shape(size)
    with pytest.raises(ValueError, match="frames must be"):
        shared_model.noise_shape(SampleSize(tiny.height, tiny.width, tiny.frames + 1))


def test_the_smallest_sample_is_decoded(shared_model: DiffusionModel) -> None:
    """Of a size that the model accepts, down to a single token."""

    def accepted(side: int) -> bool:
        try:
            return bool(shared_model.noise_shape(SampleSize(side, side)))
        except ConfigError:
            return False

    side = next(side for side in range(8, 65, 8) if accepted(side))
    size = SampleSize(side, side)
    latents = shared_model.initial_latents(noise_of(shared_model, size, rows=1), size)
    assert shared_model.decode(latents, size).shape == (1, 1, 3, side, side)


def test_a_tiny_pipeline_is_small_and_the_same_for_the_same_seed(
    family: Family, directory: Path, tmp_path: Path
) -> None:
    size_mb = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6
    assert 0.2 < size_mb < LARGE_IN_MB.get(family.name, 2)
    make_tiny_pipeline(family.name, tmp_path / "again")
    make_tiny_pipeline(family.name, tmp_path / "other", seed=1)
    files = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
    for path in files:  # tokenizers too: another vocabulary would be another model
        assert (tmp_path / "again" / path).read_bytes() == (directory / path).read_bytes(), path
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert len(weights) >= 3  # transformer, VAE, text encoders
    for path in weights:
        assert (tmp_path / "other" / path).read_bytes() != (directory / path).read_bytes(), path
    for path in directory.rglob("tokenizer.json"):  # a prompt has the same tokens, whatever the seed
        assert (tmp_path / "other" / path.relative_to(directory)).read_bytes() == path.read_bytes()


def test_a_directory_of_another_family_is_refused_before_its_weights_are_read(
    family: Family, directory: Path, tmp_path: Path
) -> None:
    for other in FAMILIES.values():
        if other is not family:
            with pytest.raises(ConfigError, match=f"expected a {other.pipeline_class.__name__}"):
                other.load(directory)
    with pytest.raises(ConfigError, match=r"no model_index\.json"):
        family.load(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        family.load(tmp_path / "nowhere")


def test_an_unavailable_hub_id_is_reported_in_one_line(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"someone/nothing.*hub") as error:
        family.load("someone/nothing")
    assert "\n" not in str(error.value)


def test_an_unknown_family_names_the_nearest_and_the_file_to_add(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'fluxx'.*'flux'.*families/fluxx\.py"):
        find_family("fluxx")
    with pytest.raises(ConfigError, match="known: sd3, flux"):
        make_tiny_pipeline("nothing-like-it", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        make_tiny_pipeline("sd3", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    make_tiny_pipeline("sd3", tmp_path / "empty")
    assert (tmp_path / "empty" / "model_index.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "notes.txt"]


def test_a_failure_while_writing_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class HalfWritten:
        def save_pretrained(self, directory: Path) -> None:
            (directory / "model_index.json").write_text("{}")
            raise OSError("disk full")

    monkeypatch.setitem(TINY_MODELS, "sd3", replace(TINY_MODELS["sd3"], build=HalfWritten))
    with pytest.raises(OSError, match="disk full"):
        make_tiny_pipeline("sd3", tmp_path / "half")
    assert list(tmp_path.iterdir()) == []


def test_a_family_outside_of_the_package_is_named_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_families.py").write_text(
        "from dataclasses import replace\n"
        "from digenrl.models.families.sd3 import SD3, SD3Model\n"
        "class OwnModel(SD3Model):\n"
        "    family = 'own'\n"
        "OWN = replace(SD3, model_class=OwnModel)\n"
        "NUMBER = 7\n"
        "from digenrl.models.pipeline_model import PipelineModel\n"
        "class Unfinished(PipelineModel):\n"
        "    family, lora_targets, text_encoders = 'unfinished', (), ()\n"
        "    encode = noise_shape = schedule = decode = SD3Model.encode\n"
        "UNFINISHED = replace(SD3, model_class=Unfinished)\n"
        "class Mistyped(OwnModel):\n"
        "    lora_targets = ('attn.to_q', 'attn.to_kk')\n"
        "MISTYPED = replace(SD3, model_class=Mistyped)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    family = find_family("own_families:OWN")
    assert family.name == "own"
    make_tiny_pipeline("sd3", tmp_path / "sd3")
    model = family.load(tmp_path / "sd3")
    add_lora(model, rank=2, alpha=2, seed=0)
    save_lora(model, tmp_path / "lora")  # an export does not need a registered family
    (tmp_path / "prompts.txt").write_text("a cat")
    options = [f"model.source={tmp_path / 'sd3'}", f"prompts={{path: {tmp_path / 'prompts.txt'}}}", "rewards=ocr"]
    options += ["sample.height=32", "sample.width=32", "training.lora.targets=null"]
    for name in ("OWN", "MISTYPED"):
        blueprint = read_blueprint(read_recipe("sd3_flow_grpo", [f"model.family=own_families:{name}", *options]))
        mistyped = pytest.raises(ConfigError, match=r"Mistyped.lora_targets: 'attn.to_kk' matches no layer")
        with mistyped if name == "MISTYPED" else nullcontext():
            check_adapters(blueprint)
    for path, named in (
        ("own_families:OWM", "'OWN'"),
        ("own_families:NUMBER", "Family"),
        ("own_families:OwnModel", r"got <class 'own_families\.OwnModel'>.*replace"),
        ("own_families:UNFINISHED", "lacks default_guidance, velocity"),
        ("missing_module:OWN", "missing_module"),
    ):
        with pytest.raises(ConfigError, match=named):
            find_family(path)
    with pytest.raises(ConfigError, match="no tiny model"):
        make_tiny_pipeline("own_families:OWN", tmp_path / "tiny")
