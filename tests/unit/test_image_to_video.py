"""Wan from images: one or two transformers; the first frame, the first and the last, or one as the sample's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from source_pictures import picture
from tiny_wan_models import tiny_wan_2_2, tiny_wan_i2v_2_1, tiny_wan_i2v_a14b

from digenrl.commands.support.derived_facts import facts_of, local_model
from digenrl.commands.support.model_probe import plain_pipeline
from digenrl.config.reading import ConfigError
from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.family import SourceCount
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.registry import find_family
from digenrl.prompts.sources import Prompt
from digenrl.testing.tiny_models import seeded_weights
from digenrl.worker.checks.sources import check_source_counts

FAMILY = find_family("wan_i2v")
SIZE = SampleSize(32, 48, frames=5)
LARGER = SampleSize(64, 96, frames=5)  # of Wan2.2 5B, which has 32 x 32 pixels per token
FIRST, LAST = picture(1, 32, 48), picture(2, 32, 48)


BUILD: dict[str, Callable[[], Any]] = {
    "a14b": tiny_wan_i2v_a14b,
    "2.1": lambda: tiny_wan_i2v_2_1(last_frame=False),
    "flf2v": lambda: tiny_wan_i2v_2_1(last_frame=True),
    "5b": tiny_wan_2_2,  # published as text-to-video
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PipelineModel]:
    root = tmp_path_factory.mktemp("tiny")
    for name, build in BUILD.items():
        with seeded_weights(0):
            build().save_pretrained(root / name)
    return {name: FAMILY.load(root / name) for name in BUILD}


@pytest.fixture
def a14b(models: dict[str, PipelineModel]) -> PipelineModel:
    return models["a14b"]


def size_of(name: str) -> SampleSize:
    return LARGER if name == "5b" else SIZE


def noise_of(model: PipelineModel, rows: int, size: SampleSize = SIZE) -> torch.Tensor:
    return torch.randn(rows, *model.noise_shape(size), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("name", "images", "guidance"),
    [
        ("a14b", [FIRST], 3.5),
        ("a14b", [FIRST, LAST], 1.0),
        ("2.1", [FIRST], 3.5),
        ("flf2v", [FIRST, LAST], 3.5),
        ("5b", [FIRST], 3.5),
        ("5b", [FIRST], 1.0),
    ],
)
@torch.no_grad()
def test_every_published_kind_equals_its_pipeline(
    models: dict[str, PipelineModel], name: str, images: list[Any], guidance: float
) -> None:
    model, size = models[name], size_of(name)
    noise, schedule = noise_of(model, 1, size), model.schedule(7, size)
    conditioning, latents = model.encode_with_images(["a red cat"], [images], size), noise
    high = (schedule.timesteps >= 900).tolist()
    assert high[0] and not high[-1]  # both transformers are used, if there are two
    for index, time in enumerate(schedule.timesteps):
        velocity = model.velocity(latents, time.expand(1), conditioning, guidance, size)
        latents = latents + (schedule.sigmas[index + 1] - schedule.sigmas[index]) * velocity
    arguments = {"num_frames": size.frames, "num_inference_steps": 7, "negative_prompt": [""]}
    arguments |= {**model.sample_arguments(noise, size), **model.source_arguments(images, size)}
    pipeline = plain_pipeline(model)
    theirs = pipeline(
        prompt=["a red cat"], output_type="latent", **arguments, **model.pipeline_arguments(guidance)
    ).frames
    torch.testing.assert_close(latents, theirs, atol=5e-6, rtol=0)


@torch.no_grad()
def test_prompts_with_one_and_with_two_frames_share_a_batch(a14b: PipelineModel) -> None:
    rows = [a14b.encode_with_images(["a red cat"], [images], SIZE) for images in ([FIRST], [FIRST, LAST])]
    noise, times = noise_of(a14b, 2), torch.tensor([950.0, 300.0])
    together = a14b.velocity(noise, times, Conditioning.joined(rows), 3.5, SIZE)
    for row, conditioning in enumerate(rows):
        alone = a14b.velocity(noise[row : row + 1], times[row : row + 1], conditioning, 3.5, SIZE)
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-5)
    other = a14b.encode_with_images(["a red cat"], [[LAST]], SIZE)
    changed = a14b.velocity(noise[:1], times[:1], other, 3.5, SIZE)
    assert not torch.equal(changed[0], together[0])


def test_a_model_for_first_and_last_frames_needs_both(models: dict[str, PipelineModel]) -> None:
    conditioning = models["flf2v"].encode_with_images(["a red cat"], [[FIRST]], SIZE)
    with pytest.raises(ConfigError, match="the first and the last frame"):
        models["flf2v"].velocity(noise_of(models["flf2v"], 1), torch.tensor([500.0]), conditioning, 1.0, SIZE)


@pytest.mark.parametrize(("name", "least", "most"), [("a14b", 1, 2), ("2.1", 1, 1), ("flf2v", 2, 2), ("5b", 1, 1)])
def test_how_many_frames_a_model_takes_is_known_before_it_is_loaded(
    models: dict[str, PipelineModel], name: str, least: int, most: int
) -> None:
    folder = models[name].pipeline.config._name_or_path
    assert FAMILY.sources_of(folder) == SourceCount(least, most)
    facts = facts_of(FAMILY, name, *local_model(FAMILY, Path(folder), None), size_of(name))  # with as many sources
    assert facts.parameters == sum(each.numel() for each in models[name].transformer.parameters())


def test_too_few_or_too_many_frames_are_refused_before_anything_is_loaded() -> None:
    one, two = (Prompt(0, "a cat", images=(b"",) * count, where=f"{count}.jsonl:1") for count in (1, 2))
    flf2v, first = (FAMILY.sources_of(FAMILY.sizes[size].hub_id or "") for size in ("2.1-flf2v-14b", "2.2-5b"))
    check_source_counts(FAMILY, [one], allowed=first)
    check_source_counts(FAMILY, [two], allowed=flf2v)
    for prompt, allowed, takes in ((one, flf2v, "2 source images"), (two, first, "1 source image")):
        with pytest.raises(ConfigError, match=rf"{prompt.where}: .* wan_i2v takes {takes}; .* model\.source"):
            check_source_counts(FAMILY, [prompt], allowed=allowed)


def test_the_length_of_its_text_is_fixed(a14b: PipelineModel) -> None:
    text = a14b.encode(["a red cat"]).positive["encoder_hidden_states"]
    assert text is not None and text.shape[1] == 512
    with pytest.raises(ConfigError, match="fixed length"):
        FAMILY.check_text_tokens(128)


@torch.no_grad()
def test_the_first_frame_of_wan_2_2_5b_ends_at_the_source_whatever_the_noise_and_the_weights(
    models: dict[str, PipelineModel],
) -> None:
    model, time = models["5b"], torch.tensor([731.4, 55.0])
    rows = model.encode_with_images(["a red cat", "two dogs"], [[FIRST], [LAST]], LARGER)
    noise = noise_of(model, 2, LARGER)
    velocity = model.velocity(noise, time, rows, 3.5, LARGER)
    end = noise - (time / 1000).view(2, 1, 1, 1, 1) * velocity
    torch.testing.assert_close(end[:, :, :1], rows.images["source_frames"], atol=1e-5, rtol=0)
    for row in range(2):
        one = slice(row, row + 1)
        alone = model.velocity(noise[one], time[one], rows.rows(one), 3.5, LARGER)
        torch.testing.assert_close(alone[0], velocity[row], atol=1e-5, rtol=1e-5)
    swapped = model.velocity(noise, time, rows.rows(torch.tensor([1, 0])), 3.5, LARGER)
    assert not torch.equal(swapped[:, :, 1:], velocity[:, :, 1:])  # later frames see the source


def test_wan_2_2_5b_takes_one_source_image(models: dict[str, PipelineModel]) -> None:
    with pytest.raises(ConfigError, match=r"TI2V-5B takes the first frame .* 2 source images"):
        models["5b"].encode_with_images(["a red cat"], [[FIRST, LAST]], LARGER)
