"""Checksums do not depend on the number of threads, and change with every change of the content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from digenrl import checksums
from digenrl.checksums import file_checksum, quick_file_checksum, tensors_checksum

PIECE = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "PIECE_BYTES", PIECE)


def written(folder: Path, content: bytes) -> Path:
    file = folder / "file"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 10 * PIECE + 7])
def test_it_does_not_depend_on_the_number_of_threads(size: int, tmp_path: Path) -> None:
    file = written(tmp_path, (bytes(range(251)) * 3)[:size])
    tensors = {"a": torch.arange(size), "b": torch.ones(2, 3)}
    found = {
        (file_checksum(file, threads), quick_file_checksum(file, threads), tensors_checksum(tensors, threads))
        for threads in (1, 2, 64)
    }
    assert found == {(file_checksum(file), quick_file_checksum(file), tensors_checksum(tensors))}


@pytest.mark.parametrize("checksum", [file_checksum, quick_file_checksum])
def test_every_byte_of_a_file_and_the_order_of_pieces_count(
    checksum: Callable[[Path], str | int], tmp_path: Path
) -> None:
    content = bytes(index % 251 for index in range(3 * PIECE + 5))
    others = [
        content[:-1],
        content + b"\0",
        content[PIECE : 2 * PIECE] + content[:PIECE] + content[2 * PIECE :],
        b"",
    ]
    for place in range(len(content)):
        others.append(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    found = [checksum(written(tmp_path, each)) for each in (content, *others)]
    assert len(set(found)) == len(found)


def test_names_types_shapes_and_values_of_tensors_count() -> None:
    zeros = torch.zeros(4, 6)
    one = zeros.clone()
    one[3, 5] = 1
    states = [{}, {"a": zeros}, {"b": zeros}, {"a": zeros.view(6, 4)}, {"a": zeros.int()}, {"a": one}]
    states.append({"a": zeros, "b": torch.zeros(0)})
    found = [tensors_checksum(each) for each in states]
    assert len(set(found)) == len(found)


def test_strides_and_order_of_tensors_do_not_count() -> None:
    value = torch.arange(24.0).view(4, 6)
    transposed = value.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert tensors_checksum({"a": value, "b": value}) == tensors_checksum({"b": transposed, "a": value})
