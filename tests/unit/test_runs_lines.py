"""JSON-lines files: complete lines only, and truncation to a checkpoint's position."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.config.reading import ConfigError
from digenrl.run_folder.lines import JsonLines, read_lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_line_can_be_read_as_soon_as_it_is_appended(path: Path) -> None:
    lines = JsonLines(path)
    lines.append({"step": 0, "words": "ä \u2028 \udcff"})
    assert list(read_lines(path)) == [{"step": 0, "words": "ä \u2028 \udcff"}]
    assert path.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_json_is_refused_and_nothing_is_written(path: Path, number: float) -> None:
    lines = JsonLines(path)
    lines.append({"step": 0})
    with pytest.raises(ValueError, match="JSON"):
        lines.append({"step": 1, "kl": number})
    lines.append({"step": 2})
    assert list(read_lines(path)) == [{"step": 0}, {"step": 2}]


def test_truncating_removes_later_lines_and_appending_continues_from_there(path: Path) -> None:
    lines = JsonLines(path)
    lines.append({"step": 0})
    checkpoint = lines.position()
    lines.append({"step": 1})
    lines.truncate(checkpoint)
    lines.append({"step": 10})
    lines.close()
    assert list(read_lines(path)) == [{"step": 0}, {"step": 10}]


@pytest.mark.parametrize("torn", ['{"step": 1', '{"step": 1}', "x" * 200_000])
def test_an_incomplete_line_is_ignored_and_removed_when_the_file_is_opened_again(path: Path, torn: str) -> None:
    path.write_text('{"step": 0}\n' + torn)
    assert list(read_lines(path)) == [{"step": 0}]
    lines = JsonLines(path)
    assert lines.position() == len('{"step": 0}\n')
    lines.append({"step": 1})
    assert list(read_lines(path)) == [{"step": 0}, {"step": 1}]


def test_only_the_incomplete_line_of_a_long_file_is_removed(path: Path) -> None:
    lines = JsonLines(path)
    for step in range(10_000):
        lines.append({"step": step})
    whole = lines.position()
    lines.close()
    with path.open("a") as file:
        file.write('{"step": ')
    assert JsonLines(path).position() == whole > 100_000


def test_a_file_with_nothing_but_an_incomplete_line_becomes_empty(path: Path) -> None:
    path.write_text("x" * 200_000)
    assert JsonLines(path).position() == 0


def test_a_file_shorter_than_its_checkpoint_expects_is_an_error(path: Path) -> None:
    lines = JsonLines(path)
    lines.append({"step": 0})
    with pytest.raises(ConfigError, match=r"metrics.jsonl: has 11 bytes.*99"):
        lines.truncate(99)


def test_a_position_inside_a_line_is_an_error_and_cuts_nothing(path: Path) -> None:
    lines = JsonLines(path)
    lines.append({"step": 0})
    with pytest.raises(ConfigError, match="byte 5"):
        lines.truncate(5)
    assert list(read_lines(path)) == [{"step": 0}]


@pytest.mark.parametrize("damage", ["{nonsense}", "[1, 2]"])
def test_a_damaged_line_is_named_by_its_number(path: Path, damage: str) -> None:
    path.write_text('{"step": 0}\n' + damage + '\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2: "):
        list(read_lines(path))


def test_a_missing_file_is_empty_and_one_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none.jsonl")) == []
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        list(read_lines(tmp_path))
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        JsonLines(tmp_path / "none" / "none.jsonl")
