"""`publish.dtype: bfloat16`: generators get rounded adapters, and the importance ratio stays 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_runs import TINY
from scored_groups import Rollout, scored_groups

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipe import Recipe
from digenrl.config.recipe_files import fingerprint
from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.models.contract import SampleSize
from digenrl.models.model_weights import weights_state
from digenrl.records import Commit, Publish
from digenrl.testing.tiny_models import make_tiny_pipeline
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
