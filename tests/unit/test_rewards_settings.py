"""The ways to name rewards in a recipe, and the errors for wrong ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

from digenrl.config.reading import ConfigError, Frozen, parse_model
from digenrl.config.recipes.files import read_recipe
from digenrl.config.rewards.table import (
    REWARDS,
    FunctionSettings,
    OcrSettings,
    Rewards,
    parse_reward,
    parse_rewards,
)
from digenrl.rewards.packages import check_packages, is_installed
from digenrl.runs.training import check_recipe


class WithRewards(Frozen):
    """Any model that has rewards."""

    rewards: Rewards


def test_a_name_alone_is_a_reward_with_weight_one() -> None:
    assert parse_rewards("ocr") == (OcrSettings(weight=1.0),)


def test_an_import_path_is_a_reward_labeled_by_the_name_of_its_function() -> None:
    (reward,) = parse_rewards(["my_package.scores:smile"])
    assert reward == FunctionSettings(target="my_package.scores:smile")
    assert reward == parse_reward({"name": "my_package.scores:smile"})
    assert reward.shown_as == "smile"


def test_written_settings_read_back_equal() -> None:
    content = {"rewards": [{"name": "ocr", "weight": 0.7, "exact_bonus": 0.5}, "jpeg_compressibility", "a.b:c"]}
    recipe = parse_model(WithRewards, content)
    assert parse_model(WithRewards, recipe.model_dump(mode="json")) == recipe
    assert isinstance(recipe.rewards[0], OcrSettings)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ocrr", r"'ocrr'.*'ocr'.*digenrl/rewards/ocrr\.py"),
        ({"weight": 1}, "'name'"),
        ({"name": "ocr", "exact_bonuss": 1}, "'ocr': exact_bonuss: .*'exact_bonus'"),
        ({"name": "ocr", "weight": float("nan")}, "'ocr': weight: .*finite"),
        ({"name": "ocr", "frame_stride": 0}, "'ocr': frame_stride: .*0"),
        ({"name": "aesthetic"}, "'aesthetic': head: missing"),
        ({"name": "hpsv2"}, "'hpsv2': model: missing"),
        ("a-b:c", "target: .*'a-b:c'"),
        ({"name": "http", "url": "ftp://x"}, "'http': url: .*http://"),
        ({"name": "http", "url": "http://me:secret@x"}, "'http': url: .*password"),
        ({"name": "http", "url": "http://x:port"}, "'http': url: .*'http://x:port'"),
        ({"name": "http", "url": "http://x:99999"}, "'http': url: .*99999"),
        ({"name": "http", "url": " http://x:1"}, "'http': url: .*' http"),
        ({"name": "a.b:c", "memory_gb": 8}, "memory_gb = 8 .*isolated: true"),
        ({"name": "a.b:c", "timeout_s": 60}, "timeout_s = 60 .*isolated: true"),
        (7, "7"),
    ],
)
def test_an_error_names_the_reward_and_the_key(content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_reward(content)
    assert "\n" not in str(error.value)


def test_an_error_inside_a_recipe_names_the_key_of_the_recipe() -> None:
    with pytest.raises(ConfigError, match="'pickscore'") as error:
        parse_model(WithRewards, {"rewards": ["ocr", "pikscore"]})
    assert error.value.where == "rewards"


def test_there_is_at_least_one_reward_and_labels_are_unique() -> None:
    with pytest.raises(ConfigError, match="at least one reward"):
        parse_rewards([])
    with pytest.raises(ConfigError, match=r"'ocr'.*`label`"):
        parse_rewards(["ocr", {"name": "ocr", "exact_bonus": 1}])
    assert len(parse_rewards(["ocr", {"name": "ocr", "label": "strict_ocr"}])) == 2


def test_every_reward_is_listed_under_its_own_name() -> None:
    for name, settings in REWARDS.items():
        assert settings.model_fields["name"].default == name


def test_packages_that_a_reward_lacks_are_named_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("digenrl.rewards.packages.is_installed", lambda package: package != "rapidocr")
    with pytest.raises(ConfigError, match=r"'ocr'.*: rapidocr; install digenrl\[ocr\], or .* --env") as error:
        check_recipe(read_recipe("demo", []))
    assert "onnxruntime" not in str(error.value)
    served = "rewards=[{name: http, url: 'http://scorer:8790'}]"
    own = "rewards=[{name: function, target: 'mine:smile', requirements: [rapidocr], isolated: true}]"
    for override in (served, own, "mode=ray"):  # other machines of a cluster may have them
        check_packages(read_recipe("demo", [override, "evaluation=off"]))


def test_a_package_is_found_by_its_module_or_its_distribution() -> None:
    assert all(map(is_installed, ("pyyaml", "typing-extensions", "json")))
    assert not is_installed("no-such-package")


def modules_after(statement: str) -> set[str]:
    """The packages that a fresh interpreter has loaded after `statement`."""
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


def test_settings_load_without_torch() -> None:
    settings = "digenrl.config.rewards.table, digenrl.config.recipes.prompts"
    statement = f"import {settings}, digenrl.rewards, digenrl.prompts.sampler"
    assert not {"torch", "transformers", "onnxruntime", "PIL", "pyarrow", "fastapi"} & modules_after(statement)


@pytest.mark.slow
def test_libraries_load_only_when_a_reward_is_built() -> None:
    heavy = {"transformers", "onnxruntime", "rapidocr", "cv2", "PIL", "httpx", "fastapi", "uvicorn"}
    built = modules_after(
        "import sys, digenrl.rewards.contract\n"
        "from digenrl.config.rewards.table import parse_reward\n"
        "from digenrl.rewards.building import build_reward\n"
        f"assert not {heavy} & sys.modules.keys()\n"
        "build_reward(parse_reward('jpeg_compressibility'))"
    )
    assert heavy & built == {"PIL"}
