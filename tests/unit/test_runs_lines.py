"""JSON-lines files: complete lines only, and truncation to a checkpoint's position."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from live_runs import lines_of

from digenrl.config.reading import ConfigError
from digenrl.run_folder.lines import JsonLines, located_lines
from digenrl.run_folder.repair import repair_lines
from digenrl.run_folder.segments import Segment, segments_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_line_can_be_read_as_soon_as_it_is_appended(path: Path) -> None:
    lines = JsonLines(path)
    lines.append({"step": 0, "words": "ä \u2028 \udcff"})
    assert lines_of(path) == [{"step": 0, "words": "ä \u2028 \udcff"}]
    assert path.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_json_is_refused_and_nothing_is_written(path: Path, number: float) -> None:
    lines = JsonLines(path)
    lines.append({"step": 0})
    with pytest.raises(ValueError, match="JSON"):
        lines.append({"step": 1, "kl": number})
    lines.append({"step": 2})
    assert lines_of(path) == [{"step": 0}, {"step": 2}]


def test_truncating_removes_later_lines_and_appending_continues_from_there(path: Path) -> None:
    lines = JsonLines(path)
    lines.append({"step": 0})
    checkpoint = lines.position()
    lines.append({"step": 1})
    lines.truncate(checkpoint)
    lines.append({"step": 10})
    lines.close()
    assert lines_of(path) == [{"step": 0}, {"step": 10}]


@pytest.mark.parametrize("torn", ['{"step": 1', '{"step": 1}', "x" * 200_000])
def test_an_incomplete_line_is_ignored_and_removed_when_the_file_is_opened_again(path: Path, torn: str) -> None:
    path.write_text('{"step": 0}\n' + torn)
    assert lines_of(path) == [{"step": 0}]
    lines = JsonLines(path)
    assert lines.position() == len('{"step": 0}\n')
    lines.append({"step": 1})
    assert lines_of(path) == [{"step": 0}, {"step": 1}]


def test_a_file_that_is_opened_again_keeps_all_its_lines(path: Path) -> None:
    for step in range(3):
        lines = JsonLines(path)
        lines.append({"step": step})
        lines.close()
    assert [content["step"] for content in lines_of(path)] == [0, 1, 2]


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
    assert lines_of(path) == [{"step": 0}]


@pytest.mark.parametrize("damage", ["{nonsense}", "[1, 2]"])
def test_a_damaged_line_is_named_by_its_number(path: Path, damage: str) -> None:
    path.write_text('{"step": 0}\n' + damage + '\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2: "):
        lines_of(path)


def test_a_missing_file_is_empty_and_one_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    assert lines_of(tmp_path / "none.jsonl") == []
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        lines_of(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        JsonLines(tmp_path / "none" / "none.jsonl")


# --- Parts that are set aside ------------------------------------------------------------------------------------


def rotated(path: Path, steps: int, every: int) -> list[int]:
    """Lines in parts of `every` lines each, compressed; returns the position after each line."""
    lines, positions = JsonLines(path), []
    for step in range(steps):
        lines.append({"step": step})
        positions.append(lines.position())
        thread = lines.rotate(limit=0) if step % every == every - 1 else None
        if thread is not None:
            thread.join()
    lines.close()
    return positions


def test_parts_that_are_set_aside_are_compressed_and_read_as_one_file(path: Path) -> None:
    positions = rotated(path, steps=10, every=4)
    assert sorted(each.suffix for each in path.parent.glob("metrics.jsonl.*")) == [".gz", ".gz"]
    assert [content["step"] for content in lines_of(path)] == list(range(10))
    assert JsonLines(path).position() == positions[-1] == 10 * len('{"step":0}\n')
    assert JsonLines(path).rotate() is None, "small files are left alone"


@pytest.mark.parametrize("skipped", [0, 2, 4, 6, 8, 10])
def test_reading_may_begin_in_any_part(skipped: int, path: Path) -> None:
    ends = [0, *rotated(path, steps=10, every=4)]
    lines = located_lines(path, ends[skipped])
    assert [(line.start, line.content["step"]) for line in lines] == [(ends[n], n) for n in range(skipped, 10)]


@pytest.mark.parametrize("kept", [0, 2, 4, 6, 8, 10])
def test_a_file_with_parts_is_truncated_anywhere_and_goes_on(kept: int, path: Path) -> None:
    positions = [0, *rotated(path, steps=10, every=4)]
    lines = JsonLines(path)
    lines.truncate(positions[kept])
    assert lines.position() == positions[kept]
    lines.append({"step": kept})
    assert [content["step"] for content in lines_of(path)] == list(range(kept + 1))


@pytest.mark.parametrize("before", [True, False])
def test_a_file_that_is_set_aside_while_its_parts_are_listed_is_read_once(
    before: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated(path, steps=6, every=4)
    writer, listed = JsonLines(path), []

    def list_parts(of: Path) -> list[Segment]:
        parts = segments_of(of)
        if not listed:
            listed.append(True)
            thread = writer.rotate(limit=0)
            assert thread is not None
            thread.join()
        return segments_of(of) if before else parts

    monkeypatch.setattr("digenrl.run_folder.segments.segments_of", list_parts)
    assert [content["step"] for content in lines_of(path)] == list(range(6))
    assert listed


def test_a_crash_while_a_part_is_compressed_neither_loses_nor_doubles_it(path: Path) -> None:
    rotated(path, steps=4, every=4)
    (packed,) = path.parent.glob("metrics.jsonl.*")
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    assert [content["step"] for content in lines_of(path)] == list(range(4)), "in both forms"
    packed.write_bytes(b"half a fi")
    assert [content["step"] for content in lines_of(path)] == list(range(4)), "the compressed one is partial"
    packed.with_suffix("").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        lines_of(path)


# --- Mending -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b'{"a":0}\n{"a":1}\n', b'{"a":0}\n{"a":1}\n'),
        (b'{"a":0}\n{"a"', b'{"a":0}\n'),
        (b'{"a":0}\nxxxxxxx\n{"a":2}\n', b'{"a":0}\n'),
        (b'{"a":0}\n{"a":1}xx{"a":2}\n', b'{"a":0}\n'),
        (b"", b""),
        (None, b""),
    ],
)
def test_a_damaged_file_keeps_its_good_lines_and_the_original_is_set_aside(
    path: Path, content: bytes | None, kept: bytes
) -> None:
    if content is not None:
        path.write_bytes(content)
    position, remark = repair_lines(path, 16)
    assert path.read_bytes() == (kept if remark else content)
    assert position == len(kept)
    assert (remark is None) == (len(kept) == 16)
    aside = list(path.parent.glob("*.damaged-1"))
    assert [each.read_bytes() for each in aside] == ([content] if remark and content is not None else [])
