"""Evaluations use the moving average of the trained weights, on generators and on a trainer that generates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from live_runs import TINY
from scored_groups import Rollout, scored_groups
from torch import Tensor

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.recipe import Recipe
from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.models.contract import SampleSize
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.records import Commit, Encode, Evaluate, Export, HeldOutChunk, PromptRow, Publish, held_out_name
from digenrl.testing.tiny_models import make_tiny_pipeline
from digenrl.worker.blueprint import load_model, load_text_encoders, make_trainer, read_blueprint
from digenrl.worker.stages import Stages, WorkerParts

EMA = {"decay": 0.5, "every_updates": 1}
PROMPT = PromptRow("prompt-0", "a cat", {})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluated") / "sd3"
    make_tiny_pipeline("sd3", path)
    return path


@dataclass
class Run:
    """A trainer and a generator that share an exchange."""

    trainer: Stages
    generator: Stages
    exchange: TensorExchange
    folder: Path

    def train(self) -> Publish:
        """One step; returns the job that publishes its version."""
        blueprint, model = self.trainer.parts.blueprint, self.trainer.model
        sample = blueprint.recipe.sample
        size = SampleSize(sample.height, sample.width)
        rollout = Rollout(groups=2, steps=sample.denoising_steps, size=size)
        groups = scored_groups(model, blueprint.algorithm, rollout, [(0.0, 1.0, 2.0, 3.0)] * 2)
        for place, group in enumerate(groups):
            self.trainer.trainer.add_group(group, place)
        committed = self.trainer.commit(Commit(1, 0, step=0))
        return Publish(2, 0, 1, (0,), committed.weights)

    def evaluated(self, stages: Stages) -> Tensor:
        chunk = HeldOutChunk(stages.version, 0)
        stages.evaluate(Evaluate(3, 0, chunk, lane=0, prompts=(PROMPT,)))
        return self.exchange.get(held_out_name(chunk))["pixels"].clone()


def start(source: Path, folder: Path, weights: str = "auto", every: int = 1, **training: Any) -> Run:
    evaluation = {"prompts": {"path": "held_out.txt"}, "denoising_steps": 2, "every": every, "weights": weights}
    recipe = {
        **TINY,
        "model": {"family": "sd3", "source": str(source), "guidance": 1.0},
        "training": {**TINY["training"], "learning_rate": 0.05, "ema": EMA, **training},
        "evaluation": evaluation,
    }
    blueprint = read_blueprint(parse_model(Recipe, recipe))
    (folder / "exchange").mkdir()
    exchange = TensorExchange(ExchangeFolder(folder / "exchange"))
    model, encoder = load_model(blueprint, "cpu"), load_text_encoders(blueprint, "cpu")
    model.encode = encoder.encode  # type: ignore[method-assign]  for `scored_groups`
    trainer = Stages(
        WorkerParts(blueprint, exchange, model=model, trainer=make_trainer(blueprint, model, helps=True))
    )
    generator = Stages(WorkerParts(blueprint, exchange, encoder, load_model(blueprint, "cpu")))
    generator.encode(Encode(0, 0, step=0, groups=(0,), prompts=(PROMPT,)))
    return Run(trainer, generator, exchange, folder)


@pytest.mark.parametrize("lora", [TINY["training"]["lora"], None], ids=["lora", "full"])
def test_the_average_is_evaluated_and_the_served_weights_stay(source: Path, tmp_path: Path, lora: Any) -> None:
    run = start(source, tmp_path, lora=lora)
    run.generator.publish(run.train())
    served = weights_state(run.generator.model)
    shown = run.evaluated(run.generator)
    assert all(torch.equal(value, served[name]) for name, value in weights_state(run.generator.model).items())
    trained = weights_state(run.trainer.model)
    assert torch.equal(run.evaluated(run.trainer), shown)
    assert all(torch.equal(value, trained[name]) for name, value in weights_state(run.trainer.model).items())
    average = run.trainer.trainer.published_average()
    assert any(not torch.equal(value, served[name]) for name, value in average.items())
    with torch.no_grad():
        load_weights(run.generator.model, average)
    run.generator.publish(Publish(4, 0, 1, (0,), run.trainer.export(Export(5, 0, 1)).weights))  # has it already
    assert torch.equal(run.evaluated(run.generator), shown)


def test_trained_weights_are_evaluated_if_the_recipe_says_so(source: Path, tmp_path: Path) -> None:
    shown = {}
    for weights in ("ema", "trained"):
        (tmp_path / weights).mkdir()
        run = start(source, tmp_path / weights, weights)
        publish = run.train()
        run.generator.publish(publish)
        shown[weights] = run.evaluated(run.generator)
        names = run.exchange.get(publish.weights.name)
        assert any(name.startswith("average/") for name in names) == (weights == "ema")
    assert not torch.equal(shown["ema"], shown["trained"])


def test_the_average_is_published_only_with_versions_that_are_evaluated(source: Path, tmp_path: Path) -> None:
    run = start(source, tmp_path, every=2)
    names = [
        list(run.exchange.get(weights.name))
        for weights in (run.trainer.export(Export(0, 0, 0)).weights, run.train().weights)
    ]
    assert len(names[0]) == 2 * len(names[1])


def test_a_run_without_an_average_cannot_evaluate_it(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.weights"):
        start(source, tmp_path, "ema", ema=None)
