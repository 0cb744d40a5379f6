"""Recipes are found, overridden, read, written and fingerprinted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.files import fingerprint, read_recipe, shipped_recipes, write_recipe
from digenrl.config.recipes.paths import DEMO_PROMPTS
from digenrl.config.recipes.recipe import Recipe
from digenrl.prompt_sets.registry import PROMPT_SETS

TEXT = """
seed: 3
steps: 2
model: {family: sd3, source: demo}
prompts: {path: prompts.txt}
rewards: [{name: ocr, weight: 0.7}, jpeg_compressibility]
sample: {height: 32, width: 64, window: {kind: all, fraction: 0.5}}
batch: {prompts: 2, samples_per_prompt: 4}
algorithm: {name: flow_grpo, options: {clip: 1e-4, kl_weight: 0.04}}
training: {lora: {rank: 4, alpha: 8}}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """A recipe in a separate folder, next to its prompts."""
    folder = tmp_path / "somewhere"
    folder.mkdir()
    (folder / "prompts.txt").write_text("a cat\na dog\n", encoding="utf-8")
    path = folder / "mine.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def complaint(where: object, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_recipe(str(where), overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_shipped_recipe_is_found_by_its_name() -> None:
    assert read_recipe("demo").name == "demo"
    assert "did you mean 'demo'" in complaint("dmo")
    assert complaint("demo.yaml").endswith("write demo")


def test_a_file_in_the_current_folder_counts_only_if_written_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "demo.yaml"):
        Path(name).write_text(f"name: mine\n{TEXT}", encoding="utf-8")
    assert read_recipe("demo").name == "demo"
    assert read_recipe("demo.yaml").name == "mine"
    assert read_recipe("./demo").name == "mine"


def test_a_name_with_which_others_begin_is_answered_with_these_alone() -> None:
    message = complaint("sd3")
    assert "sd3_one_gpu" in message and "flux_one_gpu" not in message


def test_json_is_read_too(recipe_file: Path, tmp_path: Path) -> None:
    recipe = read_recipe(str(recipe_file))
    as_json = tmp_path / "recipe.json"
    as_json.write_text(recipe.model_dump_json(), encoding="utf-8")
    assert read_recipe(str(as_json)) == recipe


def test_an_error_in_a_file_begins_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"{TEXT}\nstpes: 3\n", encoding="utf-8")
    assert complaint(path).startswith(f"{path}: stpes: ") and "'steps'" in complaint(path)
    path.write_text(f"{TEXT}\nseed: 4\n", encoding="utf-8")
    assert "'seed'" in complaint(path) and "twice" in complaint(path)
    path.write_text("[1, 2]", encoding="utf-8")
    assert complaint(path).startswith(f"{path}: ") and "mapping" in complaint(path)
    path.write_text(f"{TEXT}\nname: ${{nobody}}\n", encoding="utf-8")
    assert complaint(path).startswith(f"{path}: name: ") and "'nobody'" in complaint(path)
    assert "No such file" in complaint(tmp_path / "absent.yaml")


def test_overrides_are_read_as_yaml_in_dot_notation(recipe_file: Path) -> None:
    overrides = [
        "steps=7",
        "training.learning_rate=1e-5",
        "training.autocast=off",
        "lanes.generators=[cuda:0, cuda:1]",
        "rewards=[ocr, {name: jpeg_compressibility, weight: 2}]",
        "name=run-${seed}",
        "algorithm.options.clip=5e-3",
        "evaluation.prompts.path=held_out.txt",
        "model.negative_prompt=",
    ]
    recipe = read_recipe(str(recipe_file), overrides)
    assert recipe.steps == 7
    assert recipe.training.learning_rate == 1e-5
    assert recipe.training.autocast == "off"
    assert recipe.lanes.generators == ("cuda:0", "cuda:1")
    assert [(reward.name, reward.weight) for reward in recipe.rewards] == [
        ("ocr", 1.0),
        ("jpeg_compressibility", 2.0),
    ]
    assert recipe.name == "run-3"
    assert recipe.algorithm.options == {"clip": 5e-3, "kl_weight": 0.04}
    assert recipe.evaluation is not None and recipe.evaluation.every == 10
    assert recipe.model.negative_prompt is None


def test_a_mapping_is_merged_and_anything_else_replaces(recipe_file: Path) -> None:
    recipe = read_recipe(str(recipe_file), ["training={lora: {rank: 8}, weight_decay: 0}", "rewards[0].weight=2"])
    assert recipe.training.lora is not None
    assert (recipe.training.lora.rank, recipe.training.lora.alpha) == (8, 8)
    assert [reward.weight for reward in recipe.rewards] == [2.0, 1.0]
    assert read_recipe(str(recipe_file), ["training.lora=null"]).training.lora is None
    assert [reward.name for reward in read_recipe(str(recipe_file), ["rewards={name: ocr}"]).rewards] == ["ocr"]


def test_another_window_or_algorithm_replaces_all_settings_of_the_old_one(recipe_file: Path) -> None:
    recipe = read_recipe(str(recipe_file), ["sample.window={kind: fast, width: 2}", "algorithm={name: flow_dpo}"])
    assert recipe.sample.window == {"kind": "fast", "width": 2}
    assert recipe.algorithm.options == {}
    merged = read_recipe(str(recipe_file), ["sample.window={fraction: 0.7}", "algorithm={options: {clip: 0.1}}"])
    assert merged.sample.window == {"kind": "all", "fraction": 0.7}
    assert merged.algorithm.options == {"clip": 0.1, "kl_weight": 0.04}


@pytest.mark.parametrize(
    ("override", "noun"),
    [
        ("training.learning_rat=1", "'training.learning_rate'"),
        ("learning_rate=1", "'training.learning_rate'"),
        ("trainig.lora.rank=1", "'training.lora.rank'"),
        ("--steps=3", "'steps'"),
        ("steps.more=3", "'steps' is a single value"),
        ("rewards.weight=3", "rewards.0.weight"),
        ("seed", "key=value"),
        ("=3", "key=value"),
        ("name='x", "YAML"),
        ("seed=${nobody}", "'nobody'"),
        ("steps=many", "'many'"),
        ("training={lora: {rnk: 1}}", "'rank'"),
        ("lanes.generators=[cuda:0, 1]", "lanes.generators[1]"),
        ("batch.slice=3", "1, 2, 4"),
        ("rewards=[ocrr]", "'ocr'"),
        ("rewards.0.wieght=2", "'weight'"),
        ("rewards.5.weight=2", "rewards.0.weight"),
        ("algorithm.options.clpi=1", "'clip'"),
        ("sample.window={kind: fsat}", "'fast'"),
        ("prompts.path=demo/trin.txt", "'demo/train.txt'"),
        ("prompts.path=prompts", "must end in .txt, .jsonl, .parquet"),
        ("cluster.trainer.labels.zone=1", "should be a string"),
        ("cluster.address=head", "HOST:PORT"),
        ("cluster.address=ray://head:10001", "HOST:PORT"),
        ("cluster.address=head:637900", "HOST:PORT"),
    ],
)
def test_an_error_in_an_override_begins_with_the_override(recipe_file: Path, override: str, noun: str) -> None:
    error = complaint(recipe_file, override)
    assert error.startswith(f"{override}: ") and noun in error


def test_an_override_given_twice_is_an_error(recipe_file: Path) -> None:
    error = complaint(recipe_file, "rewards[0].weight=1", "rewards.0.weight=2")
    assert error.startswith("rewards.0.weight: ") and "twice" in error


def test_an_open_value_must_be_given(recipe_file: Path) -> None:
    recipe_file.write_text(TEXT.replace("path: prompts.txt", "path: '???'"), encoding="utf-8")
    for overrides in ((), ("name=${prompts.path}",)):
        error = complaint(recipe_file, *overrides)
        assert error.endswith(f"digenrl train {recipe_file} prompts.path=prompts.txt")


def test_a_file_of_prompts_replaces_a_prompt_set_and_the_other_way_round(recipe_file: Path) -> None:
    def sources(*overrides: str) -> tuple[object, object]:
        prompts = read_recipe(str(recipe_file), overrides).prompts
        return prompts.path and prompts.path.name, prompts.name

    assert sources("prompts.name=scenes") == sources("prompts={name: scenes, count: 8}") == (None, "scenes")
    recipe_file.write_text(TEXT.replace("path: prompts.txt", "name: scenes"), encoding="utf-8")
    assert sources() == (None, "scenes") and sources("prompts.path=p.txt") == ("p.txt", None)
    assert "both" in complaint(recipe_file, "prompts.path=p.txt", "prompts.name=scenes")
    assert "'scenes'" in complaint(recipe_file, "prompts.name=scense")
    assert "ocr_signs" in complaint(recipe_file, "prompts.name=null")


def test_an_evaluation_takes_the_held_out_split_of_a_prompt_set(recipe_file: Path) -> None:
    recipe = read_recipe(str(recipe_file), ["prompts.name=ocr_signs", "evaluation.prompts.name=ocr_signs"])
    assert recipe.evaluation is not None
    assert (recipe.prompts.split, recipe.evaluation.prompts.split) == ("train", "held_out")
    assert read_recipe(str(recipe_file), ["evaluation.prompts={name: scenes, split: train}"]) is not None


def test_a_prompt_set_counts_as_the_file_that_it_would_be(recipe_file: Path) -> None:
    def fingerprint_of(*overrides: str) -> str:
        return fingerprint(read_recipe(str(recipe_file), overrides))

    lines = [prompt.as_json_line() for prompt in PROMPT_SETS["objects"].prompts(count=20)]
    (recipe_file.parent / "objects.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    as_file = fingerprint_of(f"prompts.path={recipe_file.parent / 'objects.jsonl'}")
    assert fingerprint_of("prompts={name: objects, count: 20}") == as_file
    others = ({"count": 21}, {"seed": 1}, {"split": "held_out"}, {"name": "counts"})
    changed = [{"name": "objects", "count": 20, **other} for other in others]
    assert as_file not in {fingerprint_of(f"prompts={content}") for content in changed}
    assert fingerprint_of("prompts.count=1") != fingerprint_of()


def test_modules_are_found_in_the_current_folder_and_beside_the_recipe(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    here, beside = tmp_path / "here", recipe_file.parent
    (here / "in_a_package").mkdir(parents=True)
    (here / "own_rewards.py").touch()
    (beside / "own_algorithm.py").touch()
    monkeypatch.chdir(here)
    text = TEXT.replace("name: flow_grpo, options: {clip: 1e-4, kl_weight: 0.04}", "name: 'own_algorithm:Mine'")
    recipe_file.write_text(text, encoding="utf-8")
    assert read_recipe(str(recipe_file)).python_path == (beside,)
    assert read_recipe(str(recipe_file), ["rewards=own_rewards:red"]).python_path == (beside, here)
    overrides = ["evaluation={prompts: {name: scenes}, rewards: [{name: 'in_a_package.mine:red'}]}"]
    recipe = read_recipe(str(recipe_file), overrides)
    assert recipe.python_path == (beside, here) and {str(here), str(beside)} <= set(sys.path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "again.yaml").write_text(write_recipe(recipe), encoding="utf-8")
    assert read_recipe("again.yaml") == recipe, "a resumed run finds them from any folder"
    for wrong in ("[3]", "{a: b}", "null"):
        assert complaint(recipe_file, f"python_path={wrong}").startswith("python_path=")
    for given in ("here", "[here]"):
        assert read_recipe(str(recipe_file), [f"python_path={given}"]).python_path == (here, beside)
    assert read_recipe(str(recipe_file), ["rewards=own_algorithm:red"]).python_path == (beside,)


def test_paths_are_relative_to_the_recipe_and_those_of_overrides_to_the_current_folder(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = tmp_path / "here", recipe_file.parent
    for folder in (here / "model", beside / "model", beside / "weights"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    assert read_recipe(str(recipe_file)).prompts.path == beside / "prompts.txt"
    assert read_recipe("../somewhere/mine.yaml").prompts.path.resolve() == beside / "prompts.txt"

    recipe_file.write_text(
        TEXT.replace("source: demo", "source: model").replace("name: ocr", "name: pickscore, model: weights"),
        encoding="utf-8",
    )
    from_file = read_recipe(str(recipe_file), ["prompts={shuffle: false}"])
    assert from_file.prompts.path == beside / "prompts.txt"
    assert from_file.model.source == str(beside / "model")
    assert from_file.rewards[0].model_dump()["model"] == str(beside / "weights")
    for name, key in (
        ("geneval, model: m", "detector"),
        ("hpsv3", "config"),
        ("videoalign, model: m, checkpoint: c", "prompt"),
    ):
        overrides = [f"rewards={{name: {name}, {key}: ./its_own}}", "sample.frames=5"]
        reward = read_recipe(str(recipe_file), overrides)
        assert reward.rewards[0].model_dump()[key] == str(here / "its_own")

    overrides = ["model.source=model", "prompts={path: other.txt}", "evaluation.prompts.path=sub/held_out.txt"]
    from_here = read_recipe(str(recipe_file), [*overrides, "model.base_source=model"])
    assert from_here.model.source == from_here.model.base_source == str(here / "model")
    assert from_here.prompts.path == here / "other.txt"
    assert from_here.evaluation is not None and from_here.evaluation.prompts.path == here / "sub/held_out.txt"


def test_a_template_of_a_judge_may_be_beside_the_recipe_and_its_cache_need_not_exist(recipe_file: Path) -> None:
    judge = "name: judge, url: 'http://host/v1', model: vlm, template: TEMPLATE, cache: answers"
    (recipe_file.parent / "mine.txt").write_text("Rate $prompt")
    for name in ("ocr", "vlm"):
        (recipe_file.parent / name).mkdir()
    for template, expected in (("mine.txt", str(recipe_file.parent / "mine.txt")), ("ocr", "ocr")):
        recipe_file.write_text(TEXT.replace("name: ocr", judge.replace("TEMPLATE", template)))
        settings = read_recipe(str(recipe_file)).rewards[0].model_dump()
        assert (settings["template"], settings["model"]) == (expected, "vlm")
        assert settings["cache"] == str(recipe_file.parent / "answers")


def test_hub_ids_and_the_demo_are_not_paths(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe_file.parent / "demo").mkdir()
    monkeypatch.chdir(recipe_file.parent)
    assert read_recipe(str(recipe_file)).model.source == "demo"
    assert read_recipe(str(recipe_file), ["model.source=demo"]).model.source == "demo"
    assert read_recipe(str(recipe_file), ["model.source=owner/name"]).model.source == "owner/name"
    assert (
        read_recipe(str(recipe_file), ["prompts.path=demo/train.txt"]).prompts.path == DEMO_PROMPTS / "train.txt"
    )
    own = read_recipe(str(recipe_file), ["prompts.path=./demo/train.txt"])
    assert own.prompts.path == recipe_file.parent / "demo" / "train.txt"


def test_a_token_is_refused_and_not_repeated(recipe_file: Path) -> None:
    message = complaint(recipe_file, "model.token=hf_secret")
    assert "hf_secret" not in message and "hf auth login" in message and "env:" in message
    recipe_file.write_text(TEXT.replace("source: demo", "source: demo, token: hf_secret"), encoding="utf-8")
    assert "hf_secret" not in complaint(recipe_file)
    assert "inside" in complaint(recipe_file, "model.token=env:HF_TOKEN", "model.subfolder=../other")


AWKWARD = {
    "name": "1e5",
    "model": {"family": "sd3", "source": "off", "negative_prompt": "a ${seed} and \\${seed}: null"},
    "lanes": {"generators": ["cuda:0", "cpu"], "exchange": "123"},
    "logging": {"wandb": "null"},
    "evaluation": {"prompts": {"path": "/some where/é.txt"}},
}


@pytest.mark.parametrize("changes", [{}, AWKWARD], ids=["plain", "awkward"])
def test_a_written_recipe_is_read_as_an_equal_one(
    recipe_file: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    recipe = parse_model(Recipe, {**read_recipe(str(recipe_file)).model_dump(), **changes})
    text = write_recipe(recipe)
    assert [line.split(":")[0] for line in text.splitlines() if line[0].isalpha()] == list(Recipe.model_fields)
    again = tmp_path / "again.yaml"
    again.write_text(text, encoding="utf-8")
    assert read_recipe(str(again)) == recipe


CHANGES_THE_UPDATE = [
    "seed=4",
    "model.guidance=2",
    "model.dtype=bfloat16",
    "model.vae_dtype=bfloat16",
    "model.text_tokens=128",
    "model.source=owner/name",
    "model.revision=v1",
    "model.variant=fp16",
    "model.subfolder=small",
    "model.base_source=owner/name",
    "prompts.shuffle=false",
    "prompts.column=text",
    "rewards=[ocr]",
    "rewards.0.weight=0.8",
    "rewards.0.exact_bonus=1",
    "sample.width=32",
    "sample.shift=3",
    "sample.noise.level=0.8",
    "sample.window.fraction=0.6",
    "batch.prompts=3",
    "batch.slice=2",
    "algorithm.options.clip=1e-5",
    "algorithm.name=grpo_guard",
    "training.learning_rate=1e-5",
    "training.lora.rank=8",
    "training.lora=null",
    "training.lora.targets=[to_q]",
    "training.lora.init=gaussian",
    "training.lora.start_from=lora",
    "training.learning_rate_warmup=2",
    "training.ema={warmup: true}",
    "training.old_log_probs=recomputed",
    "training.autocast=bf16",
    "training.ema={decay: 0.5}",
    "techniques.tcss=0.1",
    "shuffled_rewards=true",
    "reward_sum=normalized",
]
CHANGES_NO_UPDATE = [
    "model.token=env:HF_TOKEN",
    "name=other",
    "steps=9",
    "mode=colocated",
    "lanes.generators=3",
    "lanes.device=cpu",
    "evaluation={prompts: {path: held_out.txt}}",
    "checkpoint.every=1",
    "logging.wandb=project",
    "sample.decode_rows=1",
    "training.pack_size=1",
    "training.job_samples=2",
    "training.gradient_checkpointing=true",
    "techniques={gap: false, tsp: false, tag: none, dispatch: eager}",
    "rewards.0.label=text",
    "rewards.0.threads=2",
    "algorithm.options.clip=0.00010",
]


@pytest.mark.parametrize("override", CHANGES_THE_UPDATE)
def test_fingerprints_differ_if_updates_differ(recipe_file: Path, override: str) -> None:
    assert fingerprint(read_recipe(str(recipe_file), [override])) != fingerprint(read_recipe(str(recipe_file)))


@pytest.mark.parametrize("override", CHANGES_NO_UPDATE)
def test_fingerprints_are_equal_if_updates_are_equal(recipe_file: Path, override: str) -> None:
    assert fingerprint(read_recipe(str(recipe_file), [override])) == fingerprint(read_recipe(str(recipe_file)))


def test_prompts_count_by_content_not_by_path(recipe_file: Path, tmp_path: Path) -> None:
    before = fingerprint(read_recipe(str(recipe_file)))
    moved = recipe_file.parent.rename(tmp_path / "elsewhere") / recipe_file.name
    assert fingerprint(read_recipe(str(moved))) == before
    (moved.parent / "prompts.txt").write_text("a cat\na bird\n", encoding="utf-8")
    assert fingerprint(read_recipe(str(moved))) != before


def test_equal_integers_and_floats_have_the_same_fingerprint(recipe_file: Path) -> None:
    whole, other = (
        read_recipe(str(recipe_file), [f"algorithm.options.kl_weight={text}"]) for text in ("1", "1.0")
    )
    assert fingerprint(whole) == fingerprint(other)


@pytest.mark.slow
def test_recipes_are_read_without_torch() -> None:
    program = "import sys; from digenrl.config.recipes.files import read_recipe; read_recipe('demo'); "
    program += "assert not {'torch', 'diffusers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_names_of_shipped_recipes_are_those_of_their_files() -> None:
    for name in shipped_recipes():
        assert read_recipe(name).name == name


@pytest.mark.parametrize(
    "value", ["${oc.env:HOME}", "a ${oc.env:HOME} b", "${oc.decode:1}", "${a.${oc.env:HOME}}"]
)
def test_a_recipe_cannot_read_the_environment(recipe_file: Path, value: str) -> None:
    message = complaint(recipe_file, f"model.source='{value}'")
    assert "is not allowed" in message and os.environ["HOME"] not in message
    assert "not listed" in complaint(recipe_file, "model.token=env:AWS_SECRET_ACCESS_KEY")


def test_another_algorithm_beside_the_options_of_the_old_one_is_explained() -> None:
    with pytest.raises(
        ConfigError, match=r"^algorithm\.name=diffusion_nft: .*'algorithm=\{name: diffusion_nft\}'"
    ):
        read_recipe("demo", ["algorithm.name=diffusion_nft"])
    assert read_recipe("demo", ["algorithm={name: diffusion_nft}"]).algorithm.name == "diffusion_nft"
