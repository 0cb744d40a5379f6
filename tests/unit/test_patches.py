"""Patches of weight versions: the result is the new version to the last bit, or an error."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from digenrl import byte_codecs
from digenrl.byte_codecs import Bytes, decode_change, encode_change, has_zstd
from digenrl.exchange.patches import LastPublished, Patch, VersionBytes, apply_patch, item_bytes_of, make_patch

SIZE = 3001  # several pieces, the last of them incomplete


def noise(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def special(tensor: Tensor) -> Tensor:
    """Every bit pattern counts: NaNs with another payload, both zeros, infinities, denormals."""
    changed = tensor.clone()
    changed[:6] = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-45])
    changed.view(torch.int32)[7] = 0x7FC00001 if changed.dtype == torch.float32 else 0
    return changed


def one_bit(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8)[2 * SIZE] ^= 1
    return changed


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda tensor: noise(2),
    "small": lambda tensor: tensor + 1e-4 * noise(3),
    "unchanged": lambda tensor: tensor.clone(),
    "all bits": lambda tensor: (~tensor.view(torch.int32)).view(torch.float32),
    "special values": special,
    "one bit": one_bit,
}


def as_bytes(tensor: Tensor) -> Bytes:
    return tensor.contiguous().view(torch.uint8).numpy()


def version(name: str, content: Bytes, item_bytes: int = 4) -> VersionBytes:
    return VersionBytes(name, content, zlib.crc32(content.tobytes()), item_bytes)


OLD = version("weights-1", as_bytes(noise(1)))
NEW = version("weights-2", as_bytes(noise(1) + 1e-4 * noise(3)))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_codecs, "PIECE_BYTES", 1 << 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_a_patch_restores_every_bit(change: str, dtype: torch.dtype) -> None:
    old, new = noise(1).to(dtype), CHANGES[change](noise(1)).to(dtype)
    base, target = (version(name, as_bytes(each), dtype.itemsize) for name, each in (("a", old), ("b", new)))
    patch = Patch.decode(make_patch(base, target).encode())
    found = apply_patch(patch, base)
    assert found.name == "b" and found.content.tobytes() == target.content.tobytes()
    assert base.content.tobytes() == as_bytes(old).tobytes(), "the base was modified"


def test_only_pieces_that_changed_have_content() -> None:
    assert not any(encode_change(OLD.content, OLD.content, 4))
    pieces = encode_change(OLD.content, as_bytes(one_bit(noise(1))), 4)
    assert [index for index, piece in enumerate(pieces) if piece] == [2 * SIZE // 1024]


@pytest.mark.parametrize("length", [0, 1, 7, 1023, 1025])
def test_bytes_after_the_last_whole_number_are_coded_too(length: int) -> None:
    old, new = (np.random.default_rng(seed).integers(0, 256, length, np.uint8) for seed in (1, 2))
    assert decode_change(old, encode_change(old, new, 4), 4).tobytes() == new.tobytes()


@pytest.mark.parametrize(
    "zstd", [False, pytest.param(True, marks=pytest.mark.skipif(not has_zstd(), reason="zstd"))]
)
def test_a_small_change_is_coded_in_fewer_bytes(zstd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_codecs, "PIECE_BYTES", 1 << 20)
    pieces = encode_change(OLD.content, NEW.content, 4, zstd)
    assert sum(map(len, pieces)) < 0.7 * len(NEW.content)
    assert decode_change(OLD.content, pieces, 4).tobytes() == NEW.content.tobytes()


def test_a_patch_for_another_base_is_refused() -> None:
    patch = make_patch(OLD, NEW)
    for held in (None, replace(OLD, name="weights-0")):
        with pytest.raises(ValueError, match=r"weights-2.*weights-1.*whole"):
            apply_patch(patch, held)


def test_damage_is_noticed_in_the_base_the_pieces_the_header_and_the_length() -> None:
    patch = make_patch(OLD, NEW)
    other = OLD.content.copy()
    other[5] ^= 1
    flipped = bytearray(patch.encode())
    flipped[-1] ^= 0x40
    for bad, held in (
        (patch, replace(OLD, content=other)),
        (Patch.decode(bytes(flipped)), OLD),
        (Patch.decode(patch.encode()[:-9]), OLD),
        (replace(patch, pieces=patch.pieces[1:]), OLD),
        (replace(patch, checksum=patch.checksum ^ 1), OLD),
    ):
        with pytest.raises(ValueError, match="damaged"):
            apply_patch(bad, held)
    with pytest.raises(ValueError, match="damaged"):
        Patch.decode(b"\x05" + bytes(40))
    with pytest.raises(ValueError, match="equally long"):
        make_patch(OLD, replace(NEW, content=NEW.content[1:]))


def test_every_nth_version_and_one_of_another_length_is_sent_whole() -> None:
    last = LastPublished(whole_every=3)
    bases = [last.replace(replace(OLD, name=f"weights-{number}")) for number in range(7)]
    assert [base and base.name for base in bases] == [
        *(None, "weights-0", "weights-1"),
        *(None, "weights-3", "weights-4"),
        None,
    ]
    assert last.replace(replace(OLD, name="weights-6")) is None, "exported again"
    assert last.replace(replace(OLD, name="weights-7", content=OLD.content[:8])) is None
    assert item_bytes_of([torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(1)]) == 4
