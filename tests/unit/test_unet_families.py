"""UNets that predict noise or v, seen as velocity models; the contract suite covers what all families share."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, EDMDPMSolverMultistepScheduler, PNDMScheduler
from torch import Tensor

from digenrl.commands.support.diffusers_snippet import diffusers_snippet
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.models.contract import Schedule
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.registry import find_family
from digenrl.models.stochastic_step import StepTimes, stochastic_step
from digenrl.models.trajectory import StepNoise
from digenrl.run_folder.folder import RunFolder
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size
from digenrl.training.checkpoint.export import export_weights
from digenrl.worker.blueprint import read_blueprint

SIZE, GUIDANCE, STEPS = tiny_size("sd15"), 3.0, 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "sd15"
    make_tiny_pipeline("sd15", path)
    return path


ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}  # starts at pure noise


CASES: list[tuple[str, dict[str, Any]]] = [("epsilon", {}), ("v_prediction", {}), ("v_prediction", ZERO_SNR)]


def load(directory: Path, prediction: str, **changes: object) -> PipelineModel:
    model = find_family("sd15").load(directory)
    settings = {**model.pipeline.scheduler.config, "prediction_type": prediction, **changes}
    model.pipeline.scheduler = DDIMScheduler.from_config(settings)
    return find_family("sd15").model_class(model.pipeline)


def latent_scale(schedule: Schedule, index: int) -> Tensor:
    """Latents of variance 1 are those of the flow divided by this."""
    sigma = schedule.sigmas[index]
    return ((1 - sigma).square() + sigma.square()).sqrt()


@pytest.mark.parametrize(
    ("prediction", "changes", "eta"),
    [
        *((*case, eta) for case in CASES for eta in (0.0, 0.6, 1.0)),
        *((prediction, {"timestep_spacing": "linspace"}, 0.0) for prediction in ("epsilon", "v_prediction")),
    ],
)
@torch.no_grad()
def test_a_step_with_noise_is_the_step_of_diffusers_ddim(
    directory: Path, prediction: str, changes: dict[str, object], eta: float
) -> None:
    """With the UNet's own output, the same noise, and latents in its own scale."""
    model = load(directory, prediction, **changes)
    scheduler, schedule, conditioning = (
        model.pipeline_scheduler(),
        model.schedule(STEPS, SIZE),
        model.encode(["a cat"]),
    )
    scheduler.set_timesteps(STEPS)
    generator = torch.Generator().manual_seed(1)
    x, z = (torch.randn(1, *model.noise_shape(SIZE), generator=generator) for _ in range(2))
    for index, time in enumerate(scheduler.timesteps[:-1]):
        text = torch.cat([conditioning.negative["encoder_hidden_states"], *conditioning.positive.values()])
        plain, prompted = model.transformer(torch.cat([x, x]), time, text).sample.chunk(2)
        output = plain + GUIDANCE * (prompted - plain)
        expected = scheduler.step(output, time, x, eta=eta, variance_noise=z).prev_sample
        latents, times = x * latent_scale(schedule, index), StepTimes.at(schedule, [index])
        velocity = model.velocity(latents, time.expand(1), conditioning, GUIDANCE, SIZE)
        step = stochastic_step(latents, velocity, times, StepNoise("ddim", eta), z_BL=z if eta else None)
        ours = step.next_latents_BL / latent_scale(schedule, index + 1)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@torch.no_grad()
def test_latents_have_the_mean_and_spread_that_the_vae_declares(directory: Path) -> None:
    """As in diffusers' pipelines of Stable Diffusion XL."""
    model = load(directory, "epsilon")
    model.vae.register_to_config(latents_mean=[1.0, -2.0, 3.0, 0.5], latents_std=[2.0, 1.0, 4.0, 0.5])
    mean, std = (torch.tensor(model.vae.config[name]).view(-1, 1, 1) for name in ("latents_mean", "latents_std"))
    latents = torch.randn(2, *model.noise_shape(SIZE), generator=torch.Generator().manual_seed(1))
    images = model.vae.decode(latents * std / model.vae.config.scaling_factor + mean).sample
    pixels = model.decode(latents, SIZE)
    torch.testing.assert_close(pixels[:, 0], (images / 2 + 0.5).clamp(0, 1))
    encoded = model.vae.encode(2 * pixels[:, 0] - 1).latent_dist.mode()
    expected = (encoded - mean) * model.vae.config.scaling_factor / std
    torch.testing.assert_close(model.encode_pixels(pixels), expected)


def test_a_published_repository_loads_without_its_safety_checker(directory: Path, tmp_path: Path) -> None:
    """It names a multistep scheduler; the noise levels are those of DDIM all the same."""
    folder = Path(shutil.copytree(directory, tmp_path / "sd15"))
    expected = find_family("sd15").load(folder).schedule(STEPS, SIZE)
    index = json.loads((folder / "model_index.json").read_text())
    index |= {
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
        "scheduler": ["diffusers", "PNDMScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    settings = {"skip_prk_steps": True, **find_family("sd15").scheduler.arguments}
    PNDMScheduler.from_config(settings).save_pretrained(folder / "scheduler")
    found = find_family("sd15").load(folder).schedule(STEPS, SIZE)
    assert torch.equal(found.sigmas, expected.sigmas) and torch.equal(found.timesteps, expected.timesteps)


def test_there_are_as_many_levels_as_the_scheduler_was_trained_with(directory: Path) -> None:
    """A schedule with an offset of one, as published, would end behind the last level."""
    model = load(directory, "epsilon", steps_offset=1)
    schedule = model.schedule(1000, SIZE)
    assert schedule.timesteps.tolist() == list(range(999, -1, -1))
    assert (schedule.sigmas.diff() < 0).all()
    assert model.schedule(STEPS, SIZE).timesteps[-1] == 1, "other schedules keep their offset"


def test_what_a_unet_cannot_do_is_refused_before_a_run(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="predicts 'sample'"):
        load(directory, "sample")
    with pytest.raises(ConfigError, match=r"rescale_betas_zero_snr.*timestep_spacing"):
        load(directory, "epsilon", **ZERO_SNR).schedule(STEPS, SIZE)
    pipeline = find_family("sd15").load(directory).pipeline
    pipeline.unet.register_to_config(time_cond_proj_dim=256)
    with pytest.raises(ConfigError, match=r"guidance as an input.*LCM"):
        find_family("sd15").model_class(pipeline)
    pipeline.scheduler = EDMDPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    with pytest.raises(
        ConfigError, match=r"EDMDPMSolverMultistepScheduler does not compute noise levels from betas"
    ):
        find_family("sd15").model_class(pipeline)
    with pytest.raises(ConfigError, match=r"sample\.shift.*fixed noise levels"):
        read_blueprint(read_recipe("sd15_ddpo", [f"model.source={directory}", "sample.shift=3"]))
    held_out = "evaluation={prompts: {name: ocr_signs}, shift: 2}"
    with pytest.raises(ConfigError, match=r"^evaluation\.shift.*fixed noise levels"):
        read_blueprint(read_recipe("sd15_ddpo", [f"model.source={directory}", held_out]))
    with pytest.raises(ConfigError, match=r"model\.text_tokens.*fixed length"):
        read_blueprint(read_recipe("sd15_ddpo", [f"model.source={directory}", "model.text_tokens=50"]))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="single files with a unet"):
        find_family("sd15").with_base(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="multiples of 64"):
        find_family("sd15").build_full(torch.float32, "meta").noise_shape(type(SIZE)(512, 544))


def test_the_printed_lines_load_a_trained_unet_into_diffusers(directory: Path, tmp_path: Path) -> None:
    recipe = read_recipe("sd15_ddpo", [f"model.source={directory}", "training.lora=null", "model.dtype=float32"])
    folder = RunFolder.create(tmp_path / "run", recipe, datetime.now(UTC))
    model = find_family("sd15").load(directory)
    name, weight = next(iter(model.transformer.named_parameters()))
    weight.data += 1
    export_weights(model, folder.path)
    names: dict[str, Any] = {}
    exec("\n".join(diffusers_snippet(folder, find_family("sd15"))), names)
    assert torch.equal(names["pipe"].unet.state_dict()[name], weight)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"source": "random"})})
    random = RunFolder.create(tmp_path / "random", recipe, datetime.now(UTC))
    export_weights(model, random.path)
    assert diffusers_snippet(random, find_family("sd15")) == (), "there is no pipeline to load"
