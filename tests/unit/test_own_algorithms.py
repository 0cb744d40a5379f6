"""An algorithm outside the package, named by its import path, is read, planned and trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scored_groups import Rollout, scored_groups, toy, trainer_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.models.objective import Advantages, LossTerms
from digenrl.planning.facts.recipe_workload import profiled_work
from digenrl.training.advantage_scale import AdvantageScale
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


class Misspelled(GroupRelative):
    def los(self, pairs):
        pass


class OwnConstructor(PolicyGradient):
    def __init__(self):
        pass


class NoPairs(PolicyGradient):
    def loss(self):
        pass


class Underived:
    settings_type = Settings


def not_a_class():
    pass


INSTANCE = PolicyGradient(Settings())
"""
UNANNOTATED = """
from digenrl.config.algorithms import AlgorithmSettings


class Settings(AlgorithmSettings):
    strength = 1.0
"""
NAME = "users_algorithm:PolicyGradient"


@pytest.fixture(autouse=True)
def users_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_algorithm.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "users_settings.py").write_text(UNANNOTATED, encoding="utf-8")
    (tmp_path / "users_script.py").write_text("import sys\nsys.exit('usage: users_script.py FILE')\n")
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


def test_its_module_is_not_needed_where_nothing_is_trained() -> None:
    shared = ["mode=ray", "lanes={}", "training.lora=null", "techniques.assist=both"]
    for changes in ([], shared):
        recipe = read_recipe("demo", ["algorithm={name: 'on_another_machine:PolicyGradient'}", *changes])
        assert read_blueprint(recipe, trains=False).recipe == recipe
        with pytest.raises(ConfigError, match="on_another_machine"):
            read_blueprint(recipe)
    mine = read_recipe("demo", [f"algorithm={{name: '{NAME}', options: {{updates_per_batch: 2}}}}", *shared])
    with pytest.raises(ConfigError, match=r"^techniques\.assist: both.*too large to be sent"):
        read_blueprint(mine)


@pytest.mark.parametrize(
    ("name", "options", "noun"),
    [
        (NAME, {"strenght": 1.0}, "'strength'"),
        (NAME, {"strength": -1.0}, "algorithm.options.strength"),
        ("users_algorithm:PolicyGradint", {}, "'PolicyGradient'"),
        ("users_algorithm:not_a_class", {}, "settings_type"),
        ("users_algorithm:Misspelled", {}, "does not implement loss"),
        ("users_algorithm:OwnConstructor", {}, r"OwnConstructor\(settings\).*takes \(\)"),
        ("users_algorithm:NoPairs", {}, r"loss\(self, pairs\).*takes \(self\)"),
        ("users_algorithm:Underived", {}, "GroupRelative"),
        ("users_algorithm:INSTANCE", {}, "GroupRelative"),
        ("no_such_package.module:Thing", {}, "'no_such_package'"),
        ("users_script:Thing", {}, r"SystemExit in .*users_script\.py, line 2: usage"),
        ("users_settings:Thing", {}, r"users_settings\.py, line 5: .*annotat"),
    ],
)
def test_an_error_says_what_is_known(name: str, options: dict[str, float], noun: str) -> None:
    with pytest.raises(ConfigError, match=noun):
        build_algorithm(name, options)


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (lambda count: [1.0] * count, "Advantages, got list"),
        (lambda count: Advantages((1.0,), (0,)), r"one finite number per sample, 4, got 1: \[1.0\]"),
        (lambda count: Advantages((math.nan,) * count, ()), "one finite number per sample, 4, got 4: .nan"),
        (lambda count: Advantages((1.0,) * count, (0, 99, 1, 2)), r"from 0 to 3 .*\[0, 99, 1, 2\]"),
        (lambda count: Advantages((1.0,) * count, (0, 0, 1, 1)), r"different samples .*\[0, 0, 1, 1\]"),
        (lambda count: Advantages((1.0,) * count, (0, 1)), "chose 2 of 4 samples, .*counts 4; .*trained_samples"),
    ],
)
def test_advantages_that_would_be_trained_wrongly_are_an_error_of_the_algorithm(
    returned: Callable[[int], Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, model = build_algorithm(NAME), toy()
    groups = scored_groups(model, algorithm, Rollout(groups=2, steps=6))
    trainer = trainer_of(model, algorithm, groups)
    monkeypatch.setattr(type(algorithm), "group_advantages", lambda _, rewards: returned(len(rewards)))
    with pytest.raises(ConfigError, match=f"PolicyGradient.group_advantages: .*{what}"):
        trainer.add_group(groups[0])


@pytest.mark.parametrize("scale", [0.0, math.inf, None])
def test_a_scale_that_is_no_positive_number_is_an_error_of_the_algorithm(
    scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = build_algorithm(NAME, {"advantage": {"std_over": "batch"}})
    monkeypatch.setattr(type(algorithm), "scale", lambda *_: scale)
    with pytest.raises(ConfigError, match=f"PolicyGradient.scale: .*above 0, got {scale}"):
        AdvantageScale(algorithm).factor([[0.0, 1.0]])


@pytest.mark.parametrize(
    ("returned", "noun"),
    [
        (lambda terms_M: terms_M, "LossTerms, got Tensor"),
        (lambda terms_M: LossTerms(None, None), "both None"),
        (lambda terms_M: LossTerms(terms_M.mean(), None), r"scaled_M: .*\(\d+,\), got shape \(\)"),
        (lambda terms_M: LossTerms(terms_M, terms_M[:0]), "fixed_M: .*per term"),
        (lambda terms_M: LossTerms(terms_M.detach(), None), "scaled_M has no gradient"),
        (lambda terms_M: LossTerms(terms_M, None, {"share": 0.5}), "measure 'share': .*got float"),
        (lambda terms_M: LossTerms(terms_M, None, None), "measures by name, got None"),
    ],
)
def test_a_loss_of_the_wrong_form_is_an_error_of_the_algorithm(
    returned: Callable[[torch.Tensor], Any], noun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, model = build_algorithm(NAME), toy()
    groups = scored_groups(model, algorithm, Rollout(groups=2, steps=6))
    trainer = trainer_of(model, algorithm, groups)
    monkeypatch.setattr(type(algorithm), "loss", lambda _, pairs: returned(pairs.advantage_R * pairs.log_prob_R))
    with pytest.raises(ConfigError, match=f"PolicyGradient.loss: .*{noun}"):
        trainer.add_group(groups[0])
