"""What a recipe may say, and what it is told when it says something else."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import Field

from digenrl.config.reading import ConfigError, Frozen, parse_model
from digenrl.config.recipe import Recipe

SMALLEST: dict[str, Any] = {
    "steps": 2,
    "model": {"family": "sd3", "source": "demo"},
    "prompts": {"path": "prompts.txt"},
    "rewards": "ocr",
    "sample": {"height": 32, "width": 64},
    "batch": {"prompts": 2, "samples_per_prompt": 4},
    "algorithm": {"name": "flow_grpo"},
}


def with_value(key: str, value: Any) -> dict[str, Any]:
    """The smallest recipe with one more value, under a dotted key."""
    first, _, rest = key.partition(".")
    content = dict(SMALLEST)
    content[first] = {**content.get(first, {}), rest: value} if rest else value
    return content


def complaint(key: str, value: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_model(Recipe, with_value(key, value))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_needs_seven_keys_and_has_defaults_for_the_rest() -> None:
    recipe = parse_model(Recipe, SMALLEST)
    assert (recipe.seed, recipe.mode, recipe.training.lora, recipe.evaluation) == (0, "local", None, None)
    for key in SMALLEST:
        without = {name: value for name, value in SMALLEST.items() if name != key}
        with pytest.raises(ConfigError, match=f"^{key}: missing; this key is required$"):
            parse_model(Recipe, without)


@pytest.mark.parametrize(
    ("key", "meaning"),
    [
        ("training.autocast", "off"),
        ("techniques.tag", "none"),
        ("techniques.tcss", 0.0),
        ("training.lora", None),
        ("training.ema", None),
        ("evaluation", None),
        ("logging.wandb", None),
        ("techniques.gap", False),
    ],
)
def test_off_means_off_although_yaml_reads_it_as_false(key: str, meaning: object) -> None:
    found: Any = parse_model(Recipe, with_value(key, False))
    for part in key.split("."):
        found = getattr(found, part)
    assert found == meaning and type(found) is type(meaning)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("steps", True, "steps: expected a number, got True (YAML reads yes, on, no and off as True and False)"),
        ("model.guidance", False, "model.guidance: expected a number, got False (YAML reads"),
        ("techniques.tcss", True, "techniques.tcss: expected a number, got True"),
        ("training.autocast", True, "training.autocast: input should be 'off' or 'bf16', got True"),
        ("training.lora", True, "training.lora: input should be a mapping of keys, got True"),
    ],
)
def test_yes_and_no_are_not_numbers_nor_words(key: str, value: object, message: str) -> None:
    assert complaint(key, value).startswith(message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lanes.generators", -2, "lanes.generators: input should be greater than 0, got -2"),
        ("lanes.generators", "two", "lanes.generators: input should be a whole number or a list, got 'two'"),
        ("lanes.generators", 1.5, "lanes.generators: input should be a whole number, got 1.5"),
        ("lanes.generators", ["cuda:0", 1], "lanes.generators[1]: input should be a string, got 1"),
        ("lanes.rewards", [], "lanes.rewards: an empty list of devices; give a number of lanes, or at least one"),
        ("batch.slice", "most", "batch.slice: input should be a whole number or 'auto', got 'most'"),
        ("batch.slice", 0, "batch.slice: input should be greater than 0, got 0"),
        ("training.betas", [0.9], "training.betas[1]: missing; this key is required"),
        ("training.lora", {"rnk": 4}, "training.lora.rnk: unknown key; did you mean 'rank'? known: rank, alpha"),
        ("training.lora", {"rank": 0}, "training.lora.rank: input should be greater than or equal to 1, got 0"),
        ("evaluation", {"every": 3}, "evaluation.prompts: missing; this key is required"),
        ("sample.window", 3, "sample.window: input should be a mapping of keys, got 3"),
        ("prompts.path", 3, "prompts.path: input should be a path, got 3"),
    ],
)
def test_a_complaint_names_the_place_in_the_users_own_keys(key: str, value: object, message: str) -> None:
    assert complaint(key, value).startswith(message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "batch.slice",
            3,
            "batch.slice: 3 does not divide samples_per_prompt = 4; choose one of 1, 2, 4, or auto",
        ),
        ("sample.noise", {"kind": "cps", "level": 1.2}, "sample.noise.level: the level of cps noise is a share"),
        ("sample.noise", {"kind": "ddim"}, "sample.noise.kind: input should be 'flow', 'dance', 'cps' or"),
        ("sample.shift", 0, "sample.shift: input should be greater than 0, got 0"),
        (
            "training.learning_rate",
            float("inf"),
            "training.learning_rate: input should be a finite number, got inf",
        ),
        ("name", "a/b", "name: string should match pattern"),
        ("name", "two\nlines", "name: string should match pattern"),
    ],
)
def test_settings_that_cannot_work_are_refused(key: str, value: object, message: str) -> None:
    assert complaint(key, value).startswith(message)


def test_noise_of_the_other_kinds_may_exceed_one() -> None:
    recipe = parse_model(Recipe, with_value("sample.noise", {"kind": "flow", "level": 1.2}))
    assert recipe.sample.noise.level == 1.2


def test_a_stale_share_needs_a_generator_that_runs_beside_the_trainer() -> None:
    content = {**SMALLEST, "techniques": {"tcss": 0.5}}
    assert parse_model(Recipe, content).techniques.tcss == 0.5
    with pytest.raises(ConfigError, match=r"^techniques\.tcss: 0\.5 in mode colocated.*; set it to 0, or mode to"):
        parse_model(Recipe, {**content, "mode": "colocated"})


class Part(Frozen):
    """A part of settings."""

    size: int


class Holder(Frozen):
    """Parts by name, or in a list, or one number for all."""

    by_name: dict[str, int] = Field(default={})
    several: tuple[Part, ...] | int = 1


@pytest.mark.parametrize(
    ("content", "message", "where"),
    [
        ({"by_name": {"a": "x"}}, "by_name.a: input should be a whole number, got 'x'", "by_name.a"),
        ({"several": [{"size": 1}, {}]}, "several[1].size: missing; this key is required", "several[1].size"),
        (
            {"several": [{"sice": 1, "size": 1}]},
            "several[0].sice: unknown key; did you mean 'size'? known: size",
            "several[0].sice",
        ),
        ({"several": "x"}, "several: input should be a list or a whole number, got 'x'", "several"),
    ],
)
def test_places_are_right_inside_unions_lists_and_mappings(content: Any, message: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model(Holder, content)
    assert str(caught.value) == message
    assert caught.value.where == where


def test_an_error_keeps_its_place_on_the_way_from_another_process() -> None:
    again = pickle.loads(pickle.dumps(ConfigError("seed: wrong", "seed")))
    assert (str(again), again.where) == ("seed: wrong", "seed")
