"""The exchange of one machine: tensors by name, exact, complete or absent, and removed with their run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from digenrl.exchange import folder as folder_module
from digenrl.exchange.folder import LOCK, PREFIX, ExchangeFolder, remove_abandoned
from digenrl.exchange.tensors import TensorExchange

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


@pytest.fixture
def exchange(tmp_path: Path) -> TensorExchange:
    return TensorExchange(ExchangeFolder(tmp_path))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, exchange: TensorExchange) -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).mul(100).to(dtype)
    exchange.put(
        "some", {"plain": values, "transposed": values.T, "empty": values[:0], "scalar": values[0, 0].clone()}
    )
    found = exchange.get("some")
    assert {name: value.shape for name, value in found.items()} == {
        "plain": (3, 5),
        "transposed": (5, 3),
        "empty": (0, 5),
        "scalar": (),
    }
    assert all(value.dtype is dtype for value in found.values())
    assert bits(found["plain"]) == bits(values)
    assert bits(found["transposed"]) == bits(values.T)


def test_nan_infinity_and_denormals_keep_their_bits(exchange: TensorExchange) -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    exchange.put("odd", {"x": values})
    assert bits(exchange.get("odd")["x"]) == bits(values)


def test_slices_of_one_tensor_are_stored_separately(exchange: TensorExchange) -> None:
    whole = torch.arange(8.0)
    exchange.put("parts", {"head": whole[:3], "tail": whole[3:]})
    assert exchange.get("parts")["tail"].tolist() == [3, 4, 5, 6, 7]


def test_stored_tensors_do_not_require_gradients(exchange: TensorExchange) -> None:
    exchange.put("weights", {"w": torch.ones(2, requires_grad=True)})
    assert not exchange.get("weights")["w"].requires_grad


def test_mapped_tensors_stay_valid_after_their_name_is_dropped(exchange: TensorExchange) -> None:
    exchange.put("some", {"x": torch.arange(4)})
    found = exchange.get("some")
    exchange.drop("some")
    exchange.drop("some")
    assert found["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(FileNotFoundError):
        exchange.get("some")


def test_a_name_is_complete_or_absent(exchange: TensorExchange, tmp_path: Path) -> None:
    exchange.put("known", {"x": torch.zeros(2)})
    for name in ("known", "new"):
        with pytest.raises(KeyError):
            exchange.put(name, {"x": torch.ones(2), "unsupported": torch.ones(2, dtype=torch.complex64)})
    assert ExchangeFolder(tmp_path).names() == ["known"]
    assert [path.name for path in tmp_path.iterdir()] == ["known.safetensors"]
    assert exchange.get("known")["x"].tolist() == [0, 0]


def test_damaged_weights_are_rejected(exchange: TensorExchange, tmp_path: Path) -> None:
    reference = exchange.put_weights("weights-1", {"w": torch.randn(1000)})
    path = tmp_path / "weights-1.safetensors"
    content = path.read_bytes()
    assert reference.bytes == len(content)
    assert exchange.get_weights(reference)["w"].shape == (1000,)
    for damaged in (content[:-1], content + b"\0", content[:2000] + bytes([content[2000] ^ 1]) + content[2001:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"weights-1.*damaged"):
            exchange.get_weights(reference)


def test_names_cannot_be_paths(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a name, not a path"):
        ExchangeFolder(tmp_path).path("../secret")


# --- Folders -----------------------------------------------------------------------------------------------------


def test_a_folder_is_private_and_removed_with_its_content(tmp_path: Path) -> None:
    folder = ExchangeFolder.create(0, [tmp_path])
    assert folder.root.parent == tmp_path
    assert folder.root.stat().st_mode & 0o777 == 0o700
    folder.path("some").touch()
    (folder.root / "half.part").touch()
    folder.remove()
    folder.remove()
    assert not list(tmp_path.iterdir())


def test_without_enough_space_the_folder_is_created_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared, missing = tmp_path / "shared", tmp_path / "missing"
    shared.mkdir()
    for place, wanted in ((shared, 1 << 60), (missing, 0)):
        folder = ExchangeFolder.create(wanted, [place])
        assert folder.root.parent == tmp_path
        folder.remove()
    folder = ExchangeFolder.create(1 << 60, [shared])
    folder.path("left").touch()
    assert folder._lock is not None
    os.close(folder._lock)  # as when its process ends
    ExchangeFolder.create(1 << 60, [shared]).remove()
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


def test_folders_of_ended_processes_are_removed_and_others_are_not(tmp_path: Path) -> None:
    make = (
        "import sys; from pathlib import Path; from digenrl.exchange.folder import ExchangeFolder;"
        "folder = ExchangeFolder.create(0, [Path(sys.argv[1])]); folder.path('some').touch();"
        "print(folder.root.name, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", make, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    remove_abandoned(tmp_path)
    assert (tmp_path / name / "some.safetensors").exists(), "its creator is alive"
    process.kill()
    process.communicate()
    mine = ExchangeFolder.create(0, [tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == [mine.root.name]
    mine.remove()


def test_unrelated_folders_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}notes").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / LOCK).touch()
    (tmp_path / f"{PREFIX}file").touch()
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PREFIX}file", f"{PREFIX}notes", "other"]


def test_a_folder_is_not_abandoned_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locking = folder_module.fcntl.flock

    def meanwhile(descriptor: int, how: int) -> None:
        if how == folder_module.fcntl.LOCK_EX:  # the creator's lock: another run cleans up just before
            monkeypatch.setattr(folder_module.fcntl, "flock", locking)
            remove_abandoned(tmp_path)
        locking(descriptor, how)

    monkeypatch.setattr(folder_module.fcntl, "flock", meanwhile)
    folder = ExchangeFolder.create(0, [tmp_path])
    assert (folder.root / LOCK).exists()
    folder.remove()


def test_a_folder_can_be_removed_while_a_process_writes(tmp_path: Path) -> None:
    for _ in range(20):
        folder = ExchangeFolder.create(0, [tmp_path])
        began, stop = threading.Event(), threading.Event()

        def write(root: Path = folder.root, began: threading.Event = began, stop: threading.Event = stop) -> None:
            for index in range(100_000):
                began.set()
                try:
                    (root / f"{index}.safetensors").touch()
                except OSError:
                    return
                if stop.is_set():
                    return

        writer = threading.Thread(target=write)
        writer.start()
        began.wait()
        folder.remove()
        stop.set()
        writer.join()
    assert not list(tmp_path.iterdir())
