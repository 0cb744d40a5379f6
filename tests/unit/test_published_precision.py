"""Published weights: rounded to bfloat16 where that changes no bit or, if asked for, with a ratio that stays 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_runs import TINY
from scored_groups import Rollout, nudge, scored_groups
from source_pictures import encoded
from torch import Tensor

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.files import fingerprint
from digenrl.config.recipes.recipe import Recipe
from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.models.adapters.lora import add_lora
from digenrl.models.contract import DiffusionModel, SampleSize
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.models.registry import FAMILIES
from digenrl.models.rounded_weights import rounded_before_use
from digenrl.records import Commit, Publish
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size
from digenrl.worker.blueprint import load_model, load_text_encoders, make_trainer, read_blueprint
from digenrl.worker.stages import Stages, WorkerParts

ROUNDED = {"publish": {"dtype": "bfloat16"}, "techniques": {"tag": "none"}}


def recipe(**changes: Any) -> Recipe:
    training = {**TINY["training"], "old_log_probs": "recomputed", **changes.pop("training", {})}
    return parse_model(Recipe, {**TINY, **ROUNDED, "training": training, **changes})


def test_the_trainer_keeps_float32_and_the_ratio_is_one_on_samples_of_rounded_adapters(tmp_path: Path) -> None:
    make_tiny_pipeline("sd3", tmp_path / "sd3")
    settings = {"family": "sd3", "source": str(tmp_path / "sd3"), "guidance": 1.0}
    blueprint = read_blueprint(recipe(model=settings))
    (tmp_path / "exchange").mkdir()
    exchange = TensorExchange(ExchangeFolder(tmp_path / "exchange"))
    model, sampler = load_model(blueprint, "cpu"), load_model(blueprint, "cpu")
    sampler.encode = load_text_encoders(blueprint, "cpu").encode  # type: ignore[method-assign]
    parts = WorkerParts(blueprint, exchange, model=model, trainer=make_trainer(blueprint, model, helps=False))
    trainer, generator = Stages(parts), Stages(WorkerParts(blueprint, exchange, model=sampler))
    sample = blueprint.recipe.sample
    size = SampleSize(sample.height, sample.width)
    updates: list[Any] = []
    for step in range(2):
        rollout = Rollout(groups=2, steps=sample.denoising_steps, size=size, step=step, version=step)
        groups = scored_groups(sampler, blueprint.algorithm, rollout, [(0.0, 1.0, 2.0, 3.0)] * 2)
        for place, group in enumerate(groups):
            trainer.trainer.add_group(group, place)
        committed = trainer.commit(Commit(2 * step, 0, step=step))
        updates += committed.updates
        generator.publish(Publish(2 * step + 1, 0, step + 1, (0,), committed.weights))
    served, trained = weights_state(sampler), trainer.trainer.published()
    assert all(torch.equal(served[name], value.bfloat16().float()) for name, value in trained.items())
    assert any(not torch.equal(served[name], value) for name, value in trained.items())
    sent = exchange.get_weights(committed.weights).values()
    assert {value.dtype for value in sent} == {torch.bfloat16}
    assert [update["ratio_max"] for update in updates] == [1.0, 1.0]


def velocity_and_gradient(model: DiffusionModel, *, autocast: bool) -> dict[str, Tensor]:
    """The velocity, and for one family also the gradients of all trained weights by published name."""
    size = tiny_size(model.family)
    noise = torch.randn(2, *model.noise_shape(size), generator=torch.Generator().manual_seed(1))
    latents, times = model.initial_latents(noise, size), model.schedule(4, size).timesteps[[0, 2]]
    model.transformer.zero_grad()
    with torch.no_grad():
        conditioning = encoded(model, ["a cat", "two dogs and a red bird"], size)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(model.family == "sd3"):
        velocity_BL = model.velocity(latents, times, conditioning, 1.0, size)
    if velocity_BL.requires_grad:
        velocity_BL.square().sum().backward()
    gradients = {name: value.grad for name, value in model.transformer.named_parameters()}
    return {"velocity": velocity_BL.detach(), **{name: v for name, v in gradients.items() if v is not None}}


@pytest.mark.parametrize("autocast", [False, True], ids=["adapters of a bf16 base", "all weights under autocast"])
@pytest.mark.parametrize("family", ["sd3", "flux", "qwen_image", "wan", "sdxl"])
def test_weights_that_are_rounded_before_use_can_be_rounded_before_they_are_sent(
    family: str, autocast: bool, tmp_path: Path
) -> None:
    make_tiny_pipeline(family, tmp_path / family)
    model = FAMILIES[family].load(tmp_path / family, torch.float32 if autocast else torch.bfloat16, "cpu")
    if not autocast:
        add_lora(model, rank=2, alpha=4, seed=3)
    with torch.no_grad():
        nudge(model, 0.05, seed=4)
    weights, rounded = weights_state(model), rounded_before_use(model, autocast=autocast)
    velocity_and_gradient(model, autocast=autocast)  # some CPUs choose other kernels after products in bfloat16
    expected = velocity_and_gradient(model, autocast=autocast)
    assert rounded <= weights.keys() and sum(weights[name].numel() for name in rounded) > 0.9 * sum(
        value.numel() for value in weights.values()
    )
    sent = {name: value.bfloat16() if name in rounded else value for name, value in weights.items()}
    load_weights(model, sent)
    assert any(not torch.equal(value, weights[name]) for name, value in weights_state(model).items())
    found = velocity_and_gradient(model, autocast=autocast)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("changes", "noun"),
    [
        ({"training": {"lora": None}}, "lora"),
        ({"mode": "colocated", "lanes": {"device": "cpu"}}, "colocated"),
        ({"techniques": {"tag": "auto"}}, "techniques.tag"),
        ({"training": {"old_log_probs": "rollout"}}, "old_log_probs"),
    ],
)
def test_it_is_refused_where_trainer_and_generators_would_disagree(changes: dict[str, Any], noun: str) -> None:
    with pytest.raises(ConfigError, match=noun) as refused:
        recipe(**changes)
    assert refused.value.where == "publish.dtype"


def test_only_rounding_changes_the_fingerprint() -> None:
    plain = recipe(publish={})
    assert fingerprint(plain) == fingerprint(recipe(publish={"dtype": "float32"})) != fingerprint(recipe())
    assert plain.publish.dtype == "auto"
