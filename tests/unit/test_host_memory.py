"""Free host memory: the machine's, or the container's if that is less. Models pass through it one by one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from digenrl import host_memory
from digenrl.exchange import folder
from digenrl.host_memory import free_host_bytes, loading_in_turn, physical_bytes, total_host_bytes
from digenrl.training.packing import pack_size
from digenrl.transports.processes import describe_exit

MEMINFO = "MemTotal:       2000 kB\nMemFree:         10 kB\nMemAvailable:    1000 kB\nHugePages_Total:       0\n"
CONTAINER = {
    "memory.max": "900000\n",
    "memory.current": "500000\n",
    "memory.stat": "anon 1\ninactive_file 100000\n",
}


@pytest.mark.parametrize(
    ("meminfo", "container", "expected"),
    [
        (MEMINFO, {}, 1_024_000),
        (MEMINFO, CONTAINER, 500_000),
        (MEMINFO, CONTAINER | {"memory.max": "9000000\n"}, 1_024_000),
        (MEMINFO, CONTAINER | {"memory.max": "max\n"}, 1_024_000),
        (MEMINFO, CONTAINER | {"memory.current": "1200000\n"}, 0),
        ("", CONTAINER, 500_000),
        (None, {}, None),
        ("nonsense", {"memory.max": "5\n"}, None),
    ],
)
def test_the_lesser_of_machine_and_container(
    meminfo: str | None,
    container: dict[str, str],
    expected: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    if meminfo is not None:
        (tmp_path / "meminfo").write_text(meminfo)
    for name, content in container.items():
        (tmp_path / name).write_text(content)
    assert free_host_bytes() == expected


@pytest.mark.parametrize(("limit", "expected"), [("900000", 900_000), ("max", physical_bytes())])
def test_all_memory_is_that_of_the_container_if_it_has_less(
    limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    assert total_host_bytes() == physical_bytes()
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert total_host_bytes() == expected


@pytest.mark.parametrize(("free", "expected"), [(500, 250), (0, 0), (None, physical_bytes() // 2)])
def test_a_pass_on_a_cpu_gets_half_of_what_is_free_or_of_all_memory_where_that_is_unknown(
    free: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_size, "free_host_bytes", lambda: free)
    assert pack_size.free_bytes(torch.device("cpu")) == expected


def test_on_this_machine_it_is_positive_or_unknown() -> None:
    free = free_host_bytes()
    assert free is None or free > 0


@pytest.mark.parametrize(("left", "expected"), [(5, 5), (1 << 60, None), (None, None)])
def test_shared_memory_holds_no_more_than_the_machine_has(
    left: int | None, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder.ExchangeFolder(tmp_path).free_bytes()
    monkeypatch.setattr(folder, "free_host_bytes", lambda: left)
    monkeypatch.setattr(folder, "SHARED_MEMORY", tmp_path.parent)
    found = folder.ExchangeFolder(tmp_path).free_bytes()
    assert found == expected or (expected is None and abs(found - elsewhere) < 1 << 30)


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", ["left", "entered"]), ("cpu", ["entered", "left"])])
def test_workers_of_a_machine_load_to_gpus_one_after_the_other(
    device: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):  # a user without a name, as in many containers
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    order: list[str] = []
    entered = Event()

    def load() -> None:
        with loading_in_turn(device):
            order.append("entered")
            entered.set()

    other = Thread(target=load)
    with loading_in_turn(device.replace("1", "0")):
        other.start()
        entered.wait(0.5 if device != "cpu" else None)
        order.append("left")
    other.join()
    assert order == expected


@pytest.mark.parametrize(("exit_code", "named"), [(-9, True), (-15, False), (1, False)])
def test_a_killed_worker_names_the_machines_memory_as_a_possible_reason(exit_code: int, named: bool) -> None:
    assert ("memory" in describe_exit(exit_code)) == named
