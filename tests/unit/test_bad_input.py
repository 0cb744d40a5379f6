"""Bad recipes and prompt files: one line each, whatever they contain. Nothing is fuzzed that needs a model."""

from __future__ import annotations

import os
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from fake_recipes import RECIPE
from fuzzed_files import DEEP, Refusal, read_fuzzed_prompts, read_fuzzed_recipe

from digenrl.cli import main
from digenrl.config.limits import DRAWN_PROMPTS, PROMPT_CHARACTERS
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe, write_recipe
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.config.spec import read_spec
from digenrl.prompts.sources import read_prompts
from digenrl.telemetry.writing import check_writable, write_atomically

NAMED: list[str] = [
    "training.betas=[2,3]",
    "training.betas=[0.9]",
    "training.betas=[nan,0.9]",
    "sample.height=1e8",
    "sample.height=100000000",
    "sample.denoising_steps=1000000000",
    "steps=1000000000000",
    "training.lora={rank: 1000000000}",
    "batch.samples_per_prompt=1000000000000",
    "batch.prompts=1000000000000",
    "batch={prompts: 65536, samples_per_prompt: 16384}",
    "rewards={name: ocr, weight: 1e308}",
    "prompts={name: ocr_signs, count: 1000000000000}",
    "lanes.generators=1000000000",
    f"batch.slice={'9' * 5000}",
    f"batch.slice=0x{'f' * 5000}",
    f"sample.window={'[' * DEEP}{']' * DEEP}",
    f"model.source={'x' * 5000}",
    f"prompts.path={'x/' * 5000}.txt",
    f"rewards={'x' * 5000}:reward",
    "seed=\udcff",
    "a..b=1",
    "steps[0]=1",
    "=",
    "batch.slice={",
    "evaluation=&a [*a]",
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad") / "recipe.yaml"
    (path.parent / "prompts.txt").write_text("a cat\n")
    path.write_text(yaml.safe_dump(RECIPE))
    assert read_recipe(str(path)).steps == 3
    return path


def refused(path: Path, *overrides: str) -> str | None:
    """The error about a recipe, which must be one line; None if it is accepted and can be saved."""
    try:
        write_recipe(read_recipe(str(path), overrides)).encode()
    except ConfigError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 3_000, message[:300]
        return message
    return None


@pytest.mark.parametrize("override", NAMED, ids=lambda override: override[:30].encode("ascii", "replace").decode())
def test_an_impossible_setting_is_refused_in_one_line(override: str, recipe: Path) -> None:
    assert refused(recipe, override) is not None


@pytest.mark.parametrize("read", [read_fuzzed_recipe, read_fuzzed_prompts])
def test_random_files_are_accepted_or_refused_in_one_line(
    read: Callable[[int, Path], Refusal], tmp_path: Path
) -> None:
    """A sample; `python benchmarks/fuzzed_files.py` reads more of them."""
    messages = [read(seed, tmp_path).message for seed in range(150)]
    assert 100 < sum(message is not None for message in messages) < 150


@pytest.mark.slow
def test_damaged_and_endless_files_are_refused_in_one_line(recipe: Path) -> None:
    dice, whole = random.Random(22), recipe.read_bytes()
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    contents = [
        *(
            "[" * DEEP,
            "{a: " * DEEP,
            "- " * DEEP,
            "a: " * 50,
            laughs,
            "a: &a [*a]",
            'name: "\\ud800"',
            "? [a]\n: b",
        ),
        *("", "- a", "a: 1\na: 2", "!!python/object:os.system {}", "&", "%", "\t", "key: 'x"),
    ]
    raw = [text.encode() for text in contents]
    for _ in range(10):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        raw.append(bytes(damaged[: dice.randint(1, len(damaged))]))
    for suffix in (".yaml", ".json"):
        bad = recipe.with_name(f"damaged{suffix}")
        for number, content in enumerate(raw):
            bad.write_bytes(content)
            assert refused(bad) is not None or number >= len(contents)
            if number < 4:
                with pytest.raises(ConfigError):
                    read_spec(bad)


def test_bad_prompt_files_are_refused_in_one_line(tmp_path: Path) -> None:
    lines: dict[str, list[bytes]] = {
        ".txt": [b"", b"\n", b"a\n\nb", b"\xff\xfe", b"x" * (48 << 20), b" "],
        ".jsonl": [
            *(b"", b"{", b"[]", b"null", b"{}", b'{"prompt": 3}', b'{"prompt": ""}', b'{"prompt": NaN}'),
            *(b'{"prompt": "\\ud800"}', b'{"prompt": "a", "b": "\\udfff"}', b"[" * 50_000, b'{"a":' * 50_000),
            *(b'{"prompt": "a"}\x00', b'{"prompt": "' + b"x" * (PROMPT_CHARACTERS + 1) + b'"}'),
            b'{"prompt": "a", "b": ' + b"[" * 500 + b"]" * 500 + b"}",
        ],
        ".parquet": [b"", b"PAR1", b"x" * 100],
    }
    for suffix, contents in lines.items():
        for content in contents:
            path = tmp_path / f"prompts{suffix}"
            path.write_bytes(content)
            with pytest.raises(ConfigError) as caught:
                read_prompts(PromptSettings(path=path))
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 1_000
    assert len(read_prompts(PromptSettings(name="ocr_signs", count=3))) == 3
    with pytest.raises(ValueError, match=str(DRAWN_PROMPTS)):
        PromptSettings(name="ocr_signs", count=DRAWN_PROMPTS + 1)


def test_a_file_that_cannot_be_written_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "report.html.partial").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_atomically(tmp_path / "report.html", "text")


def test_a_read_only_folder_is_noticed_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match="read-only"):
        check_writable(tmp_path / "profile.yaml")


def test_a_full_disk_is_not_a_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["digenrl", "prompts", "ocr_signs", "--count", "200", "--out", str(tmp_path / "prompts.txt")]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be cut off as well
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert left.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{command[-1]}: cannot be written" in line
