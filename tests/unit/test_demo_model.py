"""The demo model, its prompts, and the script that trains it."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pretrain
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from number_images import draw_number, draw_numbers, prompt_of
from readability import EVALUATION_STEPS, SIZE, exact_share, number_reader, sample_images

from digenrl.config.recipes.prompts import PromptSettings
from digenrl.demo import held_out_prompts, model_folder, train_prompts
from digenrl.generation.noise import initial_noise
from digenrl.models.loading.pipelines import without_progress_bars
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.registry import find_family
from digenrl.prompts.sources import read_prompts
from digenrl.records import SampleId

MEGABYTES = 1e6


def texts(path: Path) -> list[str]:
    return [prompt.text for prompt in read_prompts(PromptSettings(path=path))]


@pytest.fixture(scope="module")
def model() -> PipelineModel:
    return find_family("sd3").load(model_folder())


def test_the_model_is_small_enough_to_be_packaged() -> None:
    assert sum(file.stat().st_size for file in model_folder().rglob("*") if file.is_file()) < 5 * MEGABYTES


def test_the_prompts_are_different_numbers_and_none_is_in_both_files() -> None:
    train, held_out = texts(train_prompts()), texts(held_out_prompts())
    assert (len(train), len(held_out)) == (2000, 200)
    assert len({*train, *held_out}) == 2200
    assert {*train, *held_out} <= {prompt_of(number) for number in range(1000, 10_000)}


def test_every_digit_of_a_prompt_is_a_token_and_no_prompt_is_cut(model: PipelineModel) -> None:
    for tokenizer in (model.pipeline.tokenizer, model.pipeline.tokenizer_3):
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(prompt_of(4071)).input_ids)
        assert [token[0] for token in tokens if token[0].isdigit()] == ["4", "0", "7", "1"]
        assert len(tokens) <= tokenizer.model_max_length


def test_the_model_writes_some_numbers_legibly_and_leaves_room_to_learn(model: PipelineModel) -> None:
    assert 0.2 < exact_share(model, texts(held_out_prompts())[:80], 0, number_reader()) < 0.6


def test_plain_diffusers_generates_the_same_image(model: PipelineModel) -> None:
    prompt = texts(held_out_prompts())[0]
    ours_CHW = sample_images(model, [prompt], seed=3)[0, 0]
    with without_progress_bars():
        pipeline = StableDiffusion3Pipeline.from_pretrained(model_folder())
    pipeline.set_progress_bar_config(disable=True)
    noise_BL = initial_noise(3, [SampleId(0, 0, 0)], model.noise_shape(SIZE))
    theirs_BHWC = pipeline(
        prompt,
        height=SIZE.height,
        width=SIZE.width,
        num_inference_steps=EVALUATION_STEPS,
        guidance_scale=1.0,
        max_sequence_length=12,
        latents=noise_BL,
        output_type="np",
    ).images
    torch.testing.assert_close(ours_CHW, torch.from_numpy(theirs_BHWC[0]).permute(2, 0, 1), atol=1e-4, rtol=0)


def test_an_image_does_not_depend_on_its_batch(model: PipelineModel) -> None:
    prompts = texts(held_out_prompts())[:3]
    together, alone = sample_images(model, prompts, seed=1), sample_images(model, prompts[2:], seed=1, first=2)
    torch.testing.assert_close(together[2:], alone, atol=1e-4, rtol=0)


def test_drawn_numbers_are_read_exactly_and_vary_in_appearance() -> None:
    random, numbers = Random(0), [4071, 9926, 1358, 2640]
    images_BCHW = draw_numbers(numbers, random)
    assert images_BCHW.shape == (4, 3, SIZE.height, SIZE.width)
    pixels_BFCHW = (images_BCHW / 2 + 0.5)[:, None]
    scores = number_reader().score(pixels_BFCHW, [prompt_of(number) for number in numbers], [{}] * 4)
    assert scores.parts["exact"] == (1.0,) * 4
    assert draw_number(4071, random) != draw_number(4071, random)


def test_the_script_writes_the_same_model_from_the_same_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few_prompts = tmp_path / "few.txt"
    few_prompts.write_text("\n".join(texts(held_out_prompts())[:1]))
    monkeypatch.setattr(pretrain, "held_out_prompts", lambda: few_prompts)
    for name in ("once", "again"):
        directory = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["pretrain", str(directory), "--seed=5", "--vae-steps=2", "--steps=2"])
        pretrain.main()
        assert f"{directory}: 0.0% of the held-out numbers are read exactly" in capsys.readouterr().out
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "once" / weights).read_bytes() == (tmp_path / "again" / weights).read_bytes()
    shapes = find_family("sd3").load(tmp_path / "once").transformer.state_dict()
    shipped = find_family("sd3").load(model_folder()).transformer.state_dict()
    assert {name: value.shape for name, value in shapes.items()} == {k: v.shape for k, v in shipped.items()}
