"""The schema of a recipe, its defaults, and its errors, which name the key that is wrong."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import Field

from digenrl.config.reading import ConfigError, Frozen, parse_model
from digenrl.config.recipes.recipe import Recipe

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


def error_of(key: str, value: Any) -> ConfigError:
    """The error that this value raises: one line that begins with the key that is wrong."""
    with pytest.raises(ConfigError) as caught:
        parse_model(Recipe, with_value(key, value))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{caught.value.where}: ")
    return caught.value


def test_a_recipe_needs_seven_keys_and_has_defaults_for_the_rest() -> None:
    recipe = parse_model(Recipe, SMALLEST)
    assert (recipe.seed, recipe.mode, recipe.training.lora, recipe.evaluation) == (0, "local", None, None)
    for key in SMALLEST:
        without = {name: value for name, value in SMALLEST.items() if name != key}
        with pytest.raises(ConfigError, match=f"^{key}: missing"):
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
    ("key", "value", "noun"),
    [
        ("steps", True, "number"),
        ("model.guidance", False, "number"),
        ("techniques.tcss", True, "number"),
        ("training.autocast", True, "'bf16'"),
        ("training.lora", True, "mapping"),
    ],
)
def test_booleans_are_neither_numbers_nor_words(key: str, value: object, noun: str) -> None:
    error = error_of(key, value)
    assert error.where == key and noun in str(error)


@pytest.mark.parametrize(
    ("key", "value", "where", "noun"),
    [
        ("lanes.generators", -2, "lanes.generators", "greater than 0"),
        ("lanes.generators", "two", "lanes.generators", "a whole number or a list"),
        ("lanes.generators", 1.5, "lanes.generators", "a whole number"),
        ("lanes.generators", ["cuda:0", 1], "lanes.generators[1]", "string"),
        ("lanes.rewards", [], "lanes.rewards", "empty"),
        ("lanes.generators", ["cuda:0", "auto"], "lanes.generators[1]", "cuda:1"),
        ("lanes.trainer", "cuda:x", "lanes.trainer", "cuda:1"),
        ("lanes.encoder", "gpu", "lanes.encoder", "cuda:1"),
        ("rewards", [{"name": "pickscore", "device": "cuda:-1"}], "rewards", "device: "),
        ("batch.slice", "most", "batch.slice", "'auto'"),
        ("batch.slice", 0, "batch.slice", "greater than 0"),
        ("batch.slice", 3, "batch.slice", "1, 2, 4"),
        ("training.betas", [0.9], "training.betas[1]", "missing"),
        ("training.lora", {"rnk": 4}, "training.lora.rnk", "'rank'"),
        ("training.lora", {"rank": 0}, "training.lora.rank", "1"),
        ("training.learning_rate", float("inf"), "training.learning_rate", "finite"),
        ("evaluation", {"every": 3}, "evaluation.prompts", "missing"),
        ("sample.window", 3, "sample.window", "mapping"),
        ("sample.window", {"kind": "fsat"}, "sample.window", "'fast'"),
        ("sample.noise", {"kind": "cps", "level": 1.2}, "sample.noise.level", "cps"),
        ("sample.noise", {"kind": "ddpm"}, "sample.noise.kind", "'flow'"),
        ("sample.shift", 0, "sample.shift", "greater than 0"),
        ("algorithm.name", "flow_gpro", "algorithm.name", "'flow_grpo'"),
        ("algorithm.options", {"clip": 0}, "algorithm.options.clip", "greater than 0"),
        ("prompts.path", 3, "prompts.path", "path"),
        ("name", "a/b", "name", "pattern"),
        ("name", "two\nlines", "name", "pattern"),
    ],
)
def test_an_error_names_the_wrong_key_as_the_user_wrote_it(key: str, value: object, where: str, noun: str) -> None:
    error = error_of(key, value)
    assert error.where == where and noun in str(error)


def test_the_level_of_other_kinds_of_noise_may_exceed_one() -> None:
    recipe = parse_model(Recipe, with_value("sample.noise", {"kind": "flow", "level": 1.2}))
    assert recipe.sample.noise.level == 1.2


def test_stale_samples_need_generators_that_run_concurrently_with_the_trainer() -> None:
    content = {**SMALLEST, "techniques": {"tcss": 0.5}}
    assert parse_model(Recipe, content).techniques.tcss == 0.5
    with pytest.raises(ConfigError, match=r"techniques\.tcss: .*colocated"):
        parse_model(Recipe, {**content, "mode": "colocated"})


@pytest.mark.parametrize(
    ("changes", "where", "noun"),
    [
        ({"lanes": {"ranks": 3, "cards_per_replica": 2}}, "lanes.cards_per_replica", "lanes.ranks = 3"),
        (
            {"lanes": {"ranks": 2, "cards_per_replica": 2}, "techniques": {"tag": "greedy"}},
            "techniques.tag",
            "none",
        ),
        ({"lanes": {"cards_per_generator": 2}, "mode": "ray"}, "lanes.cards_per_generator", "local"),
        (
            {"lanes": {"cards_per_generator": 2}, "model": {**SMALLEST["model"], "compile": True}},
            "model.compile",
            "auto",
        ),
        (
            {"lanes": {"cards_per_generator": 2}, "techniques": {"assist": "both"}},
            "lanes.cards_per_generator",
            "assist",
        ),
    ],
)
def test_cards_that_compute_samples_together_do_nothing_alone(
    changes: dict[str, Any], where: str, noun: str
) -> None:
    with pytest.raises(ConfigError, match=noun) as caught:
        parse_model(Recipe, {**SMALLEST, **changes})
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"lanes": {"cards": 4}, "mode": "local"}, "lanes.cards"),
        ({"lanes": {"cards": 4, "generators": 2}}, "lanes.cards"),
        ({"lanes": {"cards": 4, "generators": ["cuda:0", "cuda:1"]}}, "lanes.cards"),
        ({"lanes": {"cards": 4}, "techniques": {"assist": "trainer"}}, "lanes.cards"),
        ({"lanes": {"cards": 4}, "techniques": {"assist": False}}, "lanes.cards"),
        ({"lanes": {"cards": 4}, "techniques": {"tag": "none"}}, "lanes.cards"),
        ({"lanes": {"cards": 4}, "techniques": {"tag": False}}, "lanes.cards"),
        ({"lanes": {"cards": 4}, "techniques": [1]}, "techniques"),
        ({"lanes": {"cards": 4}, "techniques": None}, "techniques"),
        ({"lanes": {"cards": 20_000}}, "lanes.cards"),
    ],
)
def test_several_cards_contradict_other_settings_of_lanes(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model(Recipe, {**SMALLEST, "mode": "colocated", **changes})
    assert caught.value.where == where and "19999" not in str(caught.value)


@pytest.mark.parametrize("cards", [4, 4.0, "4"])
@pytest.mark.parametrize("lanes", [{}, {"generators": 3}, {"generators": ["cuda:1", "cuda:2", "cuda:3"]}])
def test_several_cards_are_a_trainer_and_generators(cards: object, lanes: dict[str, Any]) -> None:
    recipe = parse_model(Recipe, {**SMALLEST, "mode": "colocated", "lanes": {"cards": cards, **lanes}})
    generators: Any = lanes.get("generators", 3)
    expected = generators if isinstance(generators, int) else tuple(generators)
    assert recipe.shares_work and (recipe.lanes.generators, recipe.lanes.rewards) == (expected, 0)


@pytest.mark.parametrize(
    ("mode", "key", "value", "where"),
    [
        ("local", "cluster.generators", [{"slice": 2}], "cluster.generators"),
        ("local", "cluster.trainer", {"accelerator": "H100"}, "cluster.trainer"),
        ("local", "cluster.rewards", {"gpus": 0.5}, "cluster.rewards"),
        ("local", "cluster.address", "10.0.0.1:6379", "cluster.address"),
        ("colocated", "cluster.encoder", {"gpus": 1}, "cluster.encoder"),
        ("colocated", "cluster.weight_patches", "never", "cluster.weight_patches"),
        ("ray", "lanes.generators", ["cpu", "cpu"], "lanes.generators"),
        ("ray", "lanes.rewards", ["cuda:0"], "lanes.rewards"),
        ("ray", "lanes.trainer", "cuda:0", "lanes.trainer"),
        ("ray", "lanes.encoder", "cpu", "lanes.encoder"),
        ("ray", "lanes.exchange", "folder", "lanes.exchange"),
        ("ray", "cluster.generators", [{"slice": 3}], "cluster.generators[0].slice"),
    ],
)
def test_settings_of_another_mode_are_refused(mode: str, key: str, value: object, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model(Recipe, {**with_value(key, value), "mode": mode})
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("techniques", {"gap": False, "assist": "both"}, "techniques.gap"),
        ("training.links", "auto", "training.links"),
        ("training.links", {"deadline_s": 5}, "training.links"),
    ],
)
def test_settings_without_those_that_they_need_are_refused(key: str, value: object, where: str) -> None:
    assert error_of(key, value).where == where


def test_without_help_neither_generators_nor_complete_groups_matter() -> None:
    techniques = {"gap": False, "tag": "none", "assist": "both"}
    assert not parse_model(Recipe, with_value("techniques", techniques)).shares_work


def test_a_reward_of_groups_needs_slices_of_whole_groups_and_is_not_for_evaluations() -> None:
    grouped = {**SMALLEST, "rewards": {"name": "my.module:rank", "scores": "groups"}}
    for size in ("auto", 2):
        with pytest.raises(ConfigError, match=r"'rank'.*set it to 4") as caught:
            parse_model(Recipe, {**grouped, "batch": {**SMALLEST["batch"], "slice": size}})
        assert caught.value.where == "batch.slice"
    whole = {**grouped, "batch": {**SMALLEST["batch"], "slice": 4}}
    assert parse_model(Recipe, whole).batch.slice == 4
    evaluation = {"prompts": {"path": "held_out.txt"}}
    with pytest.raises(ConfigError, match="'rank'") as caught:
        parse_model(Recipe, {**whole, "evaluation": evaluation})
    assert caught.value.where == "evaluation.rewards"
    assert parse_model(Recipe, {**whole, "evaluation": {**evaluation, "rewards": "ocr"}}).evaluation is not None


def test_a_reward_of_videos_needs_videos() -> None:
    videos = {"rewards": {"name": "videoalign", "checkpoint": "weights", "prompt": "prompt_template.py"}}
    with pytest.raises(ConfigError, match=r"'videoalign'.* 2 frames, got 1") as caught:
        parse_model(Recipe, {**SMALLEST, **videos})
    assert caught.value.where == "rewards"
    with pytest.raises(ConfigError, match="got 1") as caught:
        evaluation = {"prompts": {"path": "held_out.txt"}, **videos}
        parse_model(Recipe, {**SMALLEST, "evaluation": evaluation})
    assert caught.value.where == "evaluation.rewards"
    assert parse_model(Recipe, {**SMALLEST, **videos, "sample": {**SMALLEST["sample"], "frames": 5}})


class Section(Frozen):
    """A section."""

    size: int


class Holder(Frozen):
    """Numbers by name, and a union of a list of sections and a number."""

    by_name: dict[str, int] = Field(default={})
    several: tuple[Section, ...] | int = 1


@pytest.mark.parametrize(
    ("content", "where", "noun"),
    [
        ({"by_name": {"a": "x"}}, "by_name.a", "a whole number"),
        ({"several": [{"size": 1}, {}]}, "several[1].size", "missing"),
        ({"several": [{"sice": 1, "size": 1}]}, "several[0].sice", "'size'"),
        ({"several": "x"}, "several", "a list or a whole number"),
    ],
)
def test_keys_are_right_inside_unions_lists_and_mappings(content: Any, where: str, noun: str) -> None:
    with pytest.raises(ConfigError, match=noun) as caught:
        parse_model(Holder, content)
    assert caught.value.where == where


def test_an_error_keeps_its_key_when_pickled() -> None:
    again = pickle.loads(pickle.dumps(ConfigError("seed: wrong", "seed")))
    assert (str(again), again.where) == ("seed: wrong", "seed")
