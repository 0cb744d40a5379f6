"""How a recipe names its rewards, and what it is told when it names them wrongly."""

from __future__ import annotations

import subprocess
import sys

import pytest

from digenrl.config.reading import ConfigError, Frozen, parse_model
from digenrl.config.rewards import REWARDS, FunctionSettings, OcrSettings, Rewards, parse_reward, parse_rewards


class Recipe(Frozen):
    """Stands for any model that has rewards."""

    rewards: Rewards


def test_a_name_alone_is_a_reward_with_weight_one() -> None:
    assert parse_rewards("ocr") == (OcrSettings(weight=1.0),)


def test_a_dotted_function_is_a_reward_shown_by_its_own_name() -> None:
    (reward,) = parse_rewards(["my_package.scores:smile"])
    assert reward == FunctionSettings(target="my_package.scores:smile")
    assert reward.shown_as == "smile"


def test_settings_written_out_are_read_back_the_same() -> None:
    content = {"rewards": [{"name": "ocr", "weight": 0.7, "exact_bonus": 0.5}, "jpeg_compressibility", "a.b:c"]}
    recipe = parse_model(Recipe, content)
    assert parse_model(Recipe, recipe.model_dump(mode="json")) == recipe
    assert isinstance(recipe.rewards[0], OcrSettings)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "ocrr",
            r"^unknown reward 'ocrr'; did you mean 'ocr'\? known: aesthetic, .*; add digenrl/rewards/ocrr\.py$",
        ),
        ({"weight": 1}, "^a reward needs the key 'name'; known: aesthetic"),
        (
            {"name": "ocr", "exact_bonuss": 1},
            r"^reward 'ocr': exact_bonuss: unknown key; did you mean 'exact_bonus'\?",
        ),
        ({"name": "ocr", "weight": float("nan")}, "^reward 'ocr': weight: input should be a finite number"),
        ({"name": "ocr", "frame_stride": 0}, "^reward 'ocr': frame_stride: input should be greater than 0, got 0"),
        ({"name": "aesthetic"}, "^reward 'aesthetic': head: missing"),
        ({"name": "hpsv2"}, "^reward 'hpsv2': model: missing"),
        ("a-b:c", "^reward 'function': target: expected package.module:function, got 'a-b:c'"),
        ({"name": "http", "url": "ftp://x"}, "^reward 'http': url: expected http://host:port"),
        ({"name": "http", "url": "http://me:secret@x"}, "^reward 'http': url: holds a password"),
        (7, "^a reward is a name or a mapping with the key 'name', got 7"),
    ],
)
def test_a_mistake_is_told_in_one_line(content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_reward(content)
    assert "\n" not in str(caught.value)


def test_inside_a_recipe_the_place_is_told_too() -> None:
    with pytest.raises(ConfigError, match=r"^rewards: unknown reward 'pikscore'; did you mean 'pickscore'\?"):
        parse_model(Recipe, {"rewards": ["ocr", "pikscore"]})


def test_no_reward_at_all_and_two_of_one_name_are_mistakes() -> None:
    with pytest.raises(ConfigError, match="at least one reward is needed"):
        parse_rewards([])
    with pytest.raises(ConfigError, match="two rewards are called 'ocr'; give one of them a `label`"):
        parse_rewards(["ocr", {"name": "ocr", "exact_bonus": 1}])
    assert len(parse_rewards(["ocr", {"name": "ocr", "label": "strict_ocr"}])) == 2


def test_every_entry_of_the_dictionary_is_filed_under_its_own_name() -> None:
    for name, settings in REWARDS.items():
        assert settings.model_fields["name"].default == name


def modules_after(statement: str) -> set[str]:
    """What a fresh interpreter has loaded after `statement`."""
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


def test_the_settings_and_the_room_load_without_torch() -> None:
    statement = "import digenrl.config.rewards, digenrl.config.prompts, digenrl.rewards, digenrl.prompts.sampler"
    assert not {"torch", "transformers", "onnxruntime", "PIL", "pyarrow", "fastapi"} & modules_after(statement)


def test_models_and_their_libraries_load_when_a_reward_is_built_and_not_before() -> None:
    heavy = {"transformers", "onnxruntime", "rapidocr_onnxruntime", "cv2", "PIL", "httpx", "fastapi", "uvicorn"}
    before = modules_after("import digenrl.rewards.building, digenrl.rewards.contract")
    assert not heavy & before
    built = modules_after(
        "from digenrl.config.rewards import parse_reward\n"
        "from digenrl.rewards.building import build_reward\n"
        "build_reward(parse_reward('jpeg_compressibility'))"
    )
    assert heavy & built == {"PIL"}
