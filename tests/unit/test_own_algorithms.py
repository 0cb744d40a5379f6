"""An algorithm outside the package, named by its import path, is read, planned and trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scored_groups import Rollout, scored_groups, toy, trainer_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.planning.facts.recipe_workload import profiled_work
from digenrl.worker.blueprint import read_blueprint

MODULE = """
from typing import ClassVar

from pydantic import Field

from digenrl.algorithms.contract import GroupRelative
from digenrl.config.algorithms import AlgorithmSettings
from digenrl.config.recipes.windows import FastWindow, Window
from digenrl.models.objective import LossTerms


class Settings(AlgorithmSettings):
    window: ClassVar[Window] = FastWindow(width=2)
    strength: float = Field(default=1.0, gt=0)


class PolicyGradient(GroupRelative):
    settings_type = Settings

    def loss(self, pairs):
        terms = -self.settings.strength * pairs.advantage_R * pairs.log_prob_R
        return LossTerms(scaled_M=terms, fixed_M=None, measures={"log_prob": pairs.log_prob_R.detach()})


def not_a_class():
    pass
"""
NAME = "users_algorithm:PolicyGradient"


@pytest.fixture(autouse=True)
def users_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_algorithm.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_it_trains_groups() -> None:
    algorithm, model = build_algorithm(NAME, {"strength": 2.0}), toy()
    groups = scored_groups(model, algorithm, Rollout(groups=2, steps=6))
    before = {name: weight.clone() for name, weight in model.transformer.named_parameters()}
    trainer = trainer_of(model, algorithm, groups)
    for group in groups:
        trainer.add_group(group)
    trainer.commit()
    changed = [
        name for name, weight in model.transformer.named_parameters() if not torch.equal(weight, before[name])
    ]
    assert changed and all("lora" in name for name in changed)


def test_a_recipe_with_it_is_read_planned_and_built() -> None:
    recipe = read_recipe("demo", [f"algorithm={{name: '{NAME}', options: {{strength: 0.5}}}}"])
    assert profiled_work(recipe).trained_steps == 2
    blueprint = read_blueprint(recipe)
    assert type(blueprint.algorithm).__name__ == "PolicyGradient"
    assert blueprint.window == recipe.window


@pytest.mark.parametrize(
    ("name", "options", "noun"),
    [
        (NAME, {"strenght": 1.0}, "'strength'"),
        (NAME, {"strength": -1.0}, "algorithm.options.strength"),
        ("users_algorithm:PolicyGradint", {}, "'PolicyGradient'"),
        ("users_algorithm:not_a_class", {}, "settings_type"),
        ("no_such_package.module:Thing", {}, "'no_such_package'"),
    ],
)
def test_an_error_says_what_is_known(name: str, options: dict[str, float], noun: str) -> None:
    with pytest.raises(ConfigError, match=noun):
        build_algorithm(name, options)
