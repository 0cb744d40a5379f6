"""Behavior specific to Qwen-Image, Wan and HunyuanVideo; the contract suite covers what all families share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel, UniPCMultistepScheduler
from tiny_pipelines import tiny_model
from tiny_wan_models import tiny_wan_2_2
from torch import Tensor

from digenrl.commands.support.model_probe import plain_pipeline
from digenrl.config.reading import ConfigError
from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.passes.attention import AttentionCalls
from digenrl.models.pipeline_model import EulerSteps, PipelineModel
from digenrl.models.registry import find_family
from digenrl.testing.tiny_models import make_tiny_pipeline, seeded_weights, tiny_size

PROMPTS = ["a red cat", "two small dogs running through a field of yellow flowers"]
STEPS = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    for family in ("qwen_image", "wan", "hunyuan_video"):
        make_tiny_pipeline(family, path / family)
    return path


def load(directory: Path, family: str, dtype: torch.dtype = torch.float32) -> PipelineModel:
    return find_family(family).load(directory / family, dtype)


def first_latents(model: PipelineModel, rows: int = 2) -> Tensor:
    size = tiny_size(model.family)
    noise = torch.randn(rows, *model.noise_shape(size), generator=torch.Generator().manual_seed(3))
    return model.initial_latents(noise, size)


def first_velocity(model: PipelineModel, conditioning: Conditioning, guidance: float) -> Tensor:
    size = tiny_size(model.family)
    latents = first_latents(model, len(conditioning))
    times = model.schedule(STEPS, size).timesteps[:1].expand(len(latents))
    return model.velocity(latents, times, conditioning, guidance, size)


def with_noise_behind(conditioning: Conditioning, mask_name: str) -> Conditioning:
    """The same with other values in the padding."""
    text, mask = conditioning.positive["encoder_hidden_states"], conditioning.positive[mask_name]
    assert text is not None and mask is not None and not mask.all()
    changed = torch.where(mask.bool()[..., None], text, torch.full_like(text, 7.0))
    return Conditioning({**conditioning.positive, "encoder_hidden_states": changed}, conditioning.negative)


@pytest.mark.parametrize(
    ("family", "mask_name"),
    [("qwen_image", "encoder_hidden_states_mask"), ("hunyuan_video", "encoder_attention_mask")],
)
@torch.no_grad()
def test_padding_does_not_affect_the_velocity(directory: Path, family: str, mask_name: str) -> None:
    model = load(directory, family)
    conditioning = model.encode(PROMPTS)
    expected = first_velocity(model, conditioning, model.default_guidance)
    got = first_velocity(model, with_noise_behind(conditioning, mask_name), model.default_guidance)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


# --- Qwen-Image -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "mask_name"),
    [("qwen_image", "encoder_hidden_states_mask"), ("hunyuan_video", "encoder_attention_mask")],
)
def test_compact_text_is_as_long_as_the_longest_row_and_masked_only_if_rows_differ(
    directory: Path, family: str, mask_name: str
) -> None:
    model = load(directory, family)
    conditioning = model.encode(PROMPTS)
    mask = conditioning.positive[mask_name]
    assert mask is not None
    lengths = mask.sum(dim=1).tolist()
    assert 0 < lengths[0] < lengths[1] < mask.shape[1]
    both = model.compact(conditioning).positive
    assert both["encoder_hidden_states"].shape[1] == lengths[1]
    assert both[mask_name].sum(dim=1).tolist() == lengths
    one = model.compact(conditioning.rows(torch.tensor([0, 0, 0]))).positive
    assert one["encoder_hidden_states"].shape[1] == lengths[0] and one[mask_name] is None


@torch.no_grad()
def test_hunyuan_video_predicts_the_same_with_and_without_a_mask(directory: Path) -> None:
    """Rows of one prompt run unmasked, and masked beside a longer prompt: the shorter's velocity is the same."""
    model = load(directory, "hunyuan_video")
    conditioning = model.encode(PROMPTS)
    together = first_velocity(model, conditioning, 6.0)
    alone = first_velocity(model, conditioning.rows(torch.tensor([0, 0])), 6.0)
    torch.testing.assert_close(alone[0], together[0], atol=1e-6, rtol=0)


@torch.no_grad()
def test_qwen_guidance_rotates_the_velocity_of_a_token_and_keeps_its_norm(directory: Path) -> None:
    model = load(directory, "qwen_image")
    conditioning = model.encode(PROMPTS)
    plain, guided = (first_velocity(model, conditioning, guidance) for guidance in (1.0, 4.0))
    assert not torch.allclose(plain, guided, atol=1e-3)
    torch.testing.assert_close(guided.norm(dim=-1), plain.norm(dim=-1))


def test_qwen_trains_after_a_rollout_without_gradients(directory: Path) -> None:
    """The rotary tables of a rollout are cached and used again by training."""
    model = load(directory, "qwen_image")
    conditioning = model.encode(PROMPTS)
    with torch.no_grad():
        rolled_out = first_velocity(model, conditioning, 4.0)
    trained = first_velocity(model, conditioning, 4.0)
    trained.square().sum().backward()
    assert torch.equal(trained, rolled_out)
    gradients = {name: parameter.grad for name, parameter in model.transformer.named_parameters()}
    assert gradients["img_in.weight"] is not None
    # The text stream is not used after the last block: optimizers and reductions must accept a gradient of None.
    assert gradients["transformer_blocks.1.attn.to_add_out.weight"] is None


# --- Wan --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_wan_with_first_order_unipc_equals_our_euler_loop(directory: Path) -> None:
    """At first order, UniPC is the Euler method: equal up to rounding."""
    model, size = load(directory, "wan"), tiny_size("wan")
    conditioning, latents = model.encode(PROMPTS), first_latents(model)
    ours, schedule = latents, model.schedule(STEPS, size)
    for i, time in enumerate(schedule.timesteps):
        velocity = model.velocity(ours, time.expand(2), conditioning, 5.0, size)
        ours = ours + (schedule.sigmas[i + 1] - schedule.sigmas[i]) * velocity
    pipeline = model.pipeline
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = UniPCMultistepScheduler.from_config(
        pipeline.scheduler.config, solver_order=1, disable_corrector=list(range(STEPS))
    )
    theirs = pipeline(
        PROMPTS,
        height=size.height,
        width=size.width,
        num_frames=size.frames,
        num_inference_steps=STEPS,
        guidance_scale=5.0,
        max_sequence_length=model.text_tokens,
        latents=latents,
        output_type="latent",
    ).frames
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)


@torch.no_grad()
def test_wan_in_bf16_keeps_a_few_weights_in_fp32_and_returns_fp32(directory: Path) -> None:
    model = load(directory, "wan", torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.transformer.named_parameters()}
    assert dtypes["condition_embedder.time_embedder.linear_1.weight"] == torch.float32
    assert dtypes["blocks.0.attn1.to_q.weight"] == model.dtype == torch.bfloat16
    velocity = first_velocity(model, model.encode(PROMPTS), 5.0)
    full = load(directory, "wan")
    expected = first_velocity(full, full.encode(PROMPTS), 5.0)
    assert velocity.dtype == torch.float32
    torch.testing.assert_close(velocity, expected, atol=0.2, rtol=0.1)


@pytest.fixture(scope="module")
def wan_2_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "wan_2_2"
    with seeded_weights(0):
        tiny_wan_2_2().save_pretrained(path)
    return path


@pytest.mark.parametrize(("guidance", "steps"), [(5.0, 7), (1.0, 1)])
@torch.no_grad()
def test_wan_2_2_with_one_timestep_per_sample_equals_the_pipeline_with_one_per_token(
    wan_2_2: Path, guidance: float, steps: int
) -> None:
    model, size = find_family("wan").load(wan_2_2), SampleSize(64, 96, frames=5)
    noise = torch.randn(2, *model.noise_shape(size), generator=torch.Generator().manual_seed(3))
    latents, schedule, conditioning = noise, model.schedule(steps, size), model.encode(PROMPTS)
    for index, time in enumerate(schedule.timesteps):
        velocity = model.velocity(latents, time.expand(2), conditioning, guidance, size)
        latents = latents + (schedule.sigmas[index + 1] - schedule.sigmas[index]) * velocity
    pipeline = model.pipeline
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = EulerSteps(pipeline.scheduler)
    arguments = {"height": size.height, "width": size.width, "num_frames": size.frames, "latents": noise}
    arguments |= {"num_inference_steps": steps, "negative_prompt": ["", ""], **model.pipeline_arguments(guidance)}
    theirs = pipeline(PROMPTS, output_type="latent", **arguments).frames
    torch.testing.assert_close(latents, theirs, atol=5e-6, rtol=0)
    pixels = pipeline(PROMPTS, output_type="pt", **arguments).frames
    torch.testing.assert_close(model.decode(latents, size), pixels, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="multiples of 32"):
        model.noise_shape(SampleSize(48, 64, frames=5))


def test_wan_2_2_has_its_own_vae_and_schedule_at_full_size() -> None:
    model = find_family("wan").build_full(torch.bfloat16, "meta", "2.2-5b")
    assert model.noise_shape(SampleSize(704, 1280, frames=121)) == (48, 31, 44, 80)
    assert float(model.schedule(2, SampleSize(704, 1280, frames=5)).sigmas[1]) == pytest.approx(0.8337, abs=1e-3)


# --- HunyuanVideo -----------------------------------------------------------------------------------------------


def test_a_prompt_of_hunyuan_video_survives_the_template(directory: Path) -> None:
    conditioning = load(directory, "hunyuan_video").encode(PROMPTS)
    text, mask = (conditioning.positive[name] for name in ("encoder_hidden_states", "encoder_attention_mask"))
    assert text is not None and mask is not None and text.shape[1] == mask.shape[1] == 256
    lengths = mask.sum(dim=1).tolist()
    assert 0 < lengths[0] < lengths[1] < 100
    assert not torch.equal(text[0, : lengths[0]], text[1, : lengths[0]])


def test_hunyuan_video_takes_no_negative_prompts(directory: Path) -> None:
    with pytest.raises(ValueError, match="embedded guidance"):
        load(directory, "hunyuan_video").encode(PROMPTS, ["ugly", "ugly"])


@pytest.mark.parametrize("guidance", [6.0, 1.0])
@torch.no_grad()
def test_texts_in_quotation_marks_reach_hunyuan_video_1_5_as_glyphs(
    tmp_path_factory: pytest.TempPathFactory, guidance: float
) -> None:
    make_tiny_pipeline("hunyuan_video_1_5", folder := tmp_path_factory.mktemp("tiny") / "hunyuan_video_1_5")
    model, size = find_family("hunyuan_video_1_5").load(folder), SampleSize(32, 48, frames=5)
    prompts = ['a sign that says "hello"', "a sign that says hello", 'a cat with "A" and "B"']
    noise = torch.randn(3, *model.noise_shape(size), generator=torch.Generator().manual_seed(3))
    conditioning, time = model.encode(prompts), model.schedule(1, size).timesteps[0]
    glyphs = conditioning.positive["glyphs"]
    assert glyphs is not None and [bool(row.any()) for row in glyphs] == [True, False, True]
    ours = noise - model.velocity(noise, time.expand(3), conditioning, guidance, size)
    pipeline = plain_pipeline(model)
    model.prepare_pipeline(pipeline, guidance, size)
    arguments = {"height": size.height, "width": size.width, "num_frames": size.frames, "latents": noise}
    theirs = pipeline(prompts, negative_prompt=[""] * 3, num_inference_steps=1, output_type="latent", **arguments)
    torch.testing.assert_close(ours, theirs.frames, atol=2e-5, rtol=0)
    for row in range(3):
        alone = conditioning.rows(slice(row, row + 1))
        velocity = model.velocity(noise[row : row + 1], time.expand(1), alone, guidance, size)
        torch.testing.assert_close(noise[row] - velocity[0], ours[row], atol=1e-5, rtol=0)


class NothingSeenIsNaN(AttentionCalls):
    """Attention as some kernels compute it: NaN for queries that see no key."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *further: Any, **named: Any) -> Tensor:
        output = super().attend(query, key, value, *further, **named)
        mask = named.get("attn_mask")
        return output if mask is None else torch.where(mask.any(dim=-1, keepdim=True), output, torch.nan)


def test_words_glyphs_and_padding_of_hunyuan_video_1_5_give_velocity_and_gradients_of_diffusers() -> None:
    model, size = tiny_model("hunyuan_video_1_5"), SampleSize(32, 48, frames=5)
    assert isinstance(model.transformer, HunyuanVideo15Transformer3DModel)
    prompts = ['a sign that says "hello"', "a sign", 'two cats, and a dog with "A" and "B"']
    noise = torch.randn(3, *model.noise_shape(size), generator=torch.Generator().manual_seed(3))
    times = torch.tensor([900.0, 500.0, 100.0])
    pipeline = plain_pipeline(model)
    words, word_mask, glyphs, glyph_mask = pipeline.encode_prompt(prompts, device=model.device, batch_size=3)
    theirs = pipeline.transformer(
        hidden_states=torch.cat([noise, torch.zeros_like(noise), torch.zeros_like(noise[:, :1])], dim=1),
        timestep=times,
        encoder_hidden_states=words,
        encoder_attention_mask=word_mask,
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=glyph_mask,
        image_embeds=torch.zeros(3, 4, model.transformer.config["image_embed_dim"]),
        return_dict=False,
    )[0]
    theirs.square().mean().backward()
    with NothingSeenIsNaN():
        ours = model.velocity(noise, times, model.compact(model.encode(prompts)), 1.0, size)
    ours.square().mean().backward()
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    expected = dict(pipeline.transformer.named_parameters())
    for name, parameter in model.transformer.named_parameters():
        if "image_embedder" not in name and parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5, rtol=1e-4, msg=name)
    assert model.transformer.get_parameter("context_embedder.proj_in.weight").grad is not None


def test_a_distilled_hunyuan_video_1_5_that_takes_two_timesteps_is_refused() -> None:
    pipeline = find_family("hunyuan_video_1_5").build_full(torch.bfloat16, "meta").pipeline
    pipeline.transformer.register_to_config(use_meanflow=True)
    with pytest.raises(ConfigError, match=r"`use_meanflow`.*not step-distilled"):
        find_family("hunyuan_video_1_5").model_class(pipeline)


# --- Videos -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["wan", "hunyuan_video"])
@torch.no_grad()
def test_videos_have_the_requested_number_of_frames(directory: Path, family: str) -> None:
    model, tiny = load(directory, family), tiny_size(family)
    for frames, latent_frames in ((1, 1), (9, 3)):
        size = type(tiny)(tiny.height, tiny.width, frames)
        assert model.noise_shape(size)[:2] == (16, latent_frames)
        pixels = model.decode(torch.zeros(1, *model.noise_shape(size)), size)
        assert pixels.shape == (1, frames, 3, tiny.height, tiny.width)
