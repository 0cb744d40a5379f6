"""Reading prompts from files, reporting files that are wrong, and the order in which prompts are drawn."""

from __future__ import annotations

import json
import math
from collections import Counter
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from fake_recipes import fake_recipe
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from digenrl.cli import app
from digenrl.commands.sample import SampleRequest, requested_prompts
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.prompts.checks import check_prompts
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt, read_prompts


def read(path: Path, column: str = "prompt") -> tuple[Prompt, ...]:
    return read_prompts(PromptSettings(path=path, column=column))


def written(directory: Path, name: str, content: str | bytes) -> Path:
    path = directory / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def numbered(count: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(index, f"prompt {index}") for index in range(count))


def step_of(sampler: PromptSampler, step: int) -> list[Prompt]:
    return [sampler.prompt_for(step, group) for group in range(sampler.prompts_per_step)]


def test_text_lines_are_kept_exactly(tmp_path: Path) -> None:
    content = "a cat\n# not a comment\n  spaces kept \nun chat\u2028noir\r\nlast"
    texts = ["a cat", "# not a comment", "  spaces kept ", "un chat\u2028noir", "last"]
    for end in ("", "\n", "\n\n\r\n"):
        found = read(written(tmp_path, "p.txt", content + end))
        assert found == tuple(Prompt(at, text) for at, text in enumerate(texts))


def test_a_byte_order_mark_is_not_part_of_a_prompt(tmp_path: Path) -> None:
    assert read(written(tmp_path, "p.txt", b"\xef\xbb\xbfa cat\n"))[0].text == "a cat"


def test_json_lines_carry_metadata(tmp_path: Path) -> None:
    content = '{"prompt": "a sign", "text": "OPEN", "n": [1, null]}\n{"n": 2, "prompt": "b"}\n'
    assert read(written(tmp_path, "p.jsonl", content)) == (
        Prompt(0, "a sign", {"text": "OPEN", "n": [1, None]}),
        Prompt(1, "b", {"n": 2}),
    )
    assert read(written(tmp_path, "q.jsonl", '{"caption": "c"}'), column="caption") == (Prompt(0, "c"),)


def test_only_the_first_prompts_of_a_file_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\nnot read\n')
    assert [prompt.text for prompt in read_prompts(PromptSettings(path=path, count=2))] == ["a", "b"]
    short = written(tmp_path, "p.txt", "a\nb\n")
    with pytest.raises(ConfigError, match="has 2 prompts, count = 3"):
        read_prompts(PromptSettings(path=short, count=3))


def test_parquet_rows_carry_metadata(tmp_path: Path) -> None:
    columns = {"day": [date(2026, 1, 2), None], "price": [Decimal("1.5"), None], "list": [[math.nan], []]}
    columns |= {"jpg": [b"\xff\xd8", None], "length": [timedelta(seconds=1.5), None]}
    table = pyarrow.table({"prompt": ["a", "b"], "text": ["x", None], "n": [1, 2], **columns})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet", row_group_size=1)
    assert read(tmp_path / "p.parquet") == (
        Prompt(
            0,
            "a",
            {"text": "x", "n": 1, "day": "2026-01-02", "price": 1.5, "list": [None], "jpg": "/9g=", "length": 1.5},
        ),
        Prompt(
            1, "b", {"text": None, "n": 2, "day": None, "price": None, "list": [], "jpg": None, "length": None}
        ),
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "", "p.txt: contains no prompts"),
        ("p.txt", "a\n\nb\n", "p.txt:2: an empty line"),
        ("p.txt", "a\nb\n  \n", "p.txt:3: an empty line"),
        ("p.txt", b"a\nb\nc\xff\n", "p.txt:3: not UTF-8 text"),
        ("p.jsonl", "", "p.jsonl: contains no prompts"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "p.jsonl:2: not valid JSON"),
        ("p.jsonl", '{"prompt": "a", "w": NaN}\n', "p.jsonl:1: not valid JSON: NaN is not a JSON value"),
        (
            "p.jsonl",
            '{"prompt": "a"}\n["b"]\n',
            'p.jsonl:2: expected an object such as {"prompt": "a cat"}, got ["b"]',
        ),
        ("p.jsonl", '{"text": "a"}\n', "p.jsonl:1: no 'prompt'; known: text; set prompts.column"),
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"prompt": 3}\n',
            "p.jsonl:2: 'prompt' must be a non-empty string, got 3",
        ),
        ("p.jsonl", '{"prompt": " "}\n', "p.jsonl:1: 'prompt' must be a non-empty string, got ' '"),
        ("p.parquet", "not parquet", "p.parquet: not a readable parquet file"),
    ],
)
def test_a_wrong_file_is_reported_with_its_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(written(tmp_path, name, content))
    assert str(caught.value).startswith(f"{tmp_path}/{message}")
    assert "\n" not in str(caught.value)


def test_a_wrong_parquet_row_is_reported_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None]}), path)
    with pytest.raises(ConfigError, match=r"p\.parquet, row 2: 'prompt'"):
        read(path)
    pyarrow.parquet.write_table(pyarrow.table({"caption": ["a"]}), path)
    with pytest.raises(ConfigError, match=r"p\.parquet, row 1: no 'prompt'; known: caption"):
        read(path)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(ConfigError, match="contains no prompts"):
        read(path)


def test_a_missing_file_and_an_unknown_format_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.txt: no such file"):
        read(tmp_path / "absent.txt")
    with pytest.raises(ConfigError, match=r"path: .*'\.jsonl'"):
        parse_model(PromptSettings, {"path": "p.json"})


@given(count=st.integers(1, 12), per_step=st.integers(1, 7), seed=st.integers(0, 99), shuffle=st.booleans())
def test_every_prompt_occurs_once_per_epoch(count: int, per_step: int, seed: int, shuffle: bool) -> None:
    sampler = PromptSampler(numbered(count), per_step, seed, shuffle)
    drawn = [prompt.id for step in range(3 * count) for prompt in step_of(sampler, step)]
    for start in range(0, len(drawn) - count + 1, count):
        assert Counter(drawn[start : start + count]) == Counter(range(count))


def test_epochs_and_seeds_have_different_orders_and_without_shuffle_that_of_the_file() -> None:
    def epoch(number: int, seed: int, shuffle: bool = True) -> list[int]:
        sampler = PromptSampler(numbered(40), 40, seed, shuffle)
        return [sampler.prompt_for(number, group).id for group in range(40)]

    orders = [epoch(number, seed) for number in range(3) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert epoch(1, 5, shuffle=False) == list(range(40))


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    sampler = PromptSampler(numbered(8), 4, seed=7)
    drawn = [[prompt.id for prompt in step_of(sampler, step)] for step in range(4)]
    assert drawn == ORDER_OF_SEED_7
    assert [sampler.prompt_for(1, group).id for group in (4, 5, 6, 7, 8)] == REPLACEMENTS_OF_STEP_1


ORDER_OF_SEED_7 = [[7, 1, 5, 0], [6, 4, 2, 3], [1, 2, 6, 5], [7, 3, 4, 0]]
REPLACEMENTS_OF_STEP_1 = [0, 7, 5, 1, 0]


@given(
    count=st.integers(1, 12),
    per_step=st.integers(1, 5),
    asked=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=20),
)
def test_earlier_calls_do_not_change_a_prompt(count: int, per_step: int, asked: list[tuple[int, int]]) -> None:
    fresh, busy = (PromptSampler(numbered(count), per_step, seed=3) for _ in range(2))
    answers = {place: busy.prompt_for(*place) for place in asked}
    assert all(busy.prompt_for(*place) == answer for place, answer in reversed(answers.items()))
    assert all(fresh.prompt_for(*place) == answers[place] for place in sorted(answers))
    assert [step_of(busy, step) for step in range(5)] == [step_of(fresh, step) for step in range(5)]


def test_a_replacement_is_a_prompt_that_the_step_does_not_have_yet_if_there_is_one() -> None:
    sampler = PromptSampler(numbered(10), 4, seed=0)
    own = {sampler.prompt_for(2, group).id for group in range(4)}
    replacements = [sampler.prompt_for(2, group).id for group in range(4, 10)]
    assert sorted(replacements) == sorted(set(range(10)) - own)
    crowded = PromptSampler(numbered(2), 4, seed=0)
    assert {crowded.prompt_for(0, group).id for group in (4, 5)} == {0, 1}


def test_a_sampler_needs_prompts_and_at_least_one_per_step() -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        PromptSampler((), 1, seed=0)
    with pytest.raises(ConfigError, match="prompts per step"):
        PromptSampler(numbered(1), 0, seed=0)
    with pytest.raises(ValueError, match="step -1"):
        PromptSampler(numbered(1), 1, seed=0).prompt_for(-1, 0)


DETECTED = {"name": "geneval", "detector": "a/b"}
SERVED = {"name": "http", "url": "http://127.0.0.1", "source_image": "reference"}
JUDGED = {"name": "judge", "url": "http://127.0.0.1", "model": "m"}


@pytest.mark.parametrize(
    ("rewards", "scored", "unscored", "message"),
    [
        ("ocr", {"text": "OPEN"}, {}, "'ocr': no text to look for"),
        ("ocr", {"text": "OPEN"}, {"text": 5}, "'ocr': metadata 'text' must be a string, got 5"),
        ("face_count", {"faces": 2}, {}, "'face_count': needs the number of faces"),
        ("imagenet", {"class": "goldfish"}, {"class": "goldfisch"}, "metadata `class`: .*did you mean 'goldfish'"),
        (DETECTED, {"include": [{"class": "cat", "count": 1}]}, {}, "'geneval': not GenEval's metadata: include"),
        ({**JUDGED, "template": "ocr"}, {"text": "OPEN"}, {}, r"'judge': the template needs \$text"),
        ({**JUDGED, "template": "edit"}, {"images": ["a.png"]}, {}, "'judge': the prompt has no source image"),
        (
            SERVED,
            {"reference": "a.png"},
            {"reference": 5},
            "'http': .*metadata 'reference' is not the path .*got 5",
        ),
    ],
)
def test_a_prompt_that_a_reward_cannot_score_is_found_before_a_run(
    tmp_path: Path, rewards: object, scored: dict[str, object], unscored: dict[str, object], message: str
) -> None:
    rows = [{"prompt": "a cat", **columns} for columns in (scored, unscored)]
    good = written(tmp_path, "good.jsonl", json.dumps(rows[0]))
    bad = written(tmp_path, "bad.jsonl", "\n".join(map(json.dumps, rows)))
    assert not check_prompts(fake_recipe(prompts={"path": good}, rewards=[rewards]))
    held_out = {"prompts": {"path": bad}}
    for recipe in (
        fake_recipe(prompts={"path": bad}, rewards=[rewards]),
        fake_recipe(prompts={"path": good}, rewards=[rewards], evaluation=held_out),
        fake_recipe(prompts={"path": good}, evaluation={**held_out, "rewards": [rewards]}),
    ):
        with pytest.raises(ConfigError, match=rf"bad\.jsonl:2: .*{message}"):
            check_prompts(recipe)


def test_rewards_have_one_metadata_key_of_source_images(tmp_path: Path) -> None:
    path = written(tmp_path, "edits.jsonl", json.dumps({"prompt": "a cat", "reference": "a.png"}))
    judge = {**JUDGED, "template": "edit"}
    with pytest.raises(ConfigError, match=r"'reference' \('http'\), 'image' \('judge'\); set `source_image`"):
        check_prompts(fake_recipe(prompts={"path": path}, rewards=[SERVED, judge]))
    same = {**judge, "source_image": "reference"}
    assert not check_prompts(fake_recipe(prompts={"path": path}, rewards=[SERVED, same]))
    edits = written(tmp_path, "with.jsonl", json.dumps({"prompt": "redder", "image": "a.png"}))
    assert not check_prompts(fake_recipe(prompts={"path": edits}, rewards=[SERVED, judge])), "both see that image"


@pytest.mark.parametrize("command", ["train", "check", "plan --cluster absent.yaml"])
def test_commands_check_prompts_first(tmp_path: Path, command: str) -> None:
    word, *options = command.split()
    path = written(tmp_path, "p.txt", 'a sign "OPEN"\na cat\n')
    error = CliRunner().invoke(app, [word, "demo", f"prompts.path={path}", *options]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"{path}:2: reward 'ocr'")


def test_a_file_to_sample_from_has_the_columns_of_the_recipe(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", '{"caption": "redder", "source": "a.png"}\n')
    columns = {"column": "caption", "image_column": "source"}
    for recipe in (fake_recipe(prompts=columns), fake_recipe(evaluation={"prompts": {"path": path, **columns}})):
        (prompt,) = requested_prompts(recipe, SampleRequest(prompts=path)).prompts
        assert (prompt.text, prompt.images) == ("redder", (tmp_path / "a.png",))


def test_held_out_prompts_that_are_also_trained_on_are_a_warning(tmp_path: Path) -> None:
    train, other = written(tmp_path, "p.txt", "a\nb\nc\n"), written(tmp_path, "q.txt", "x\nb\na\ny\n")
    (warning,) = check_prompts(fake_recipe(prompts={"path": train}, evaluation={"prompts": {"path": other}}))
    assert "2 of 4" in warning
    assert f"{other}:2" in warning
    absent = {"path": tmp_path / "absent.txt"}
    assert not check_prompts(fake_recipe(prompts=absent, evaluation={"prompts": absent}), may_be_absent=True)
