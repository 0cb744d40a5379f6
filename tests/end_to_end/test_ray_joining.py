"""Joining and starting a cluster: access, errors, and cleanup."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray_clusters import environment, family_of, is_alive, listening, until

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.cluster import ClusterSettings
from digenrl.transports.ray.internals import LOOPBACK_ONLY
from digenrl.transports.ray.joining import (
    check_is_member,
    check_private,
    check_same_ray,
    find_local_cluster,
    open_cluster,
)

# A driver with its own cluster and a worker on it. It prints facts about them, and closes at the end of its input.
DRIVER = """
import json, os, sys
from digenrl.config.recipes.cluster import ClusterSettings
from digenrl.transports.ray.joining import open_cluster
cluster = open_cluster(ClusterSettings(address="local"), min_cpus=7)
import ray
worker = ray.remote(type("Worker", (), {"pid": lambda self: os.getpid()})).remote()
facts = {"address": cluster.address, "worker": ray.get(worker.pid.remote()), "torch": "torch" in sys.modules,
         "folder": str(cluster._started.folder), "token": os.environ["RAY_AUTH_TOKEN"],
         "cpus": cluster.resources().nodes[0].total["CPU"]}
print(json.dumps(facts), flush=True)
sys.stdin.read()
cluster.close()
print(json.dumps(sorted(name for name in os.environ if name.startswith("RAY_AUTH"))), flush=True)
"""
# A driver that joins it, or is rejected.
JOINER = """
import sys
from digenrl.config.recipes.cluster import ClusterSettings
from digenrl.config.reading import ConfigError
from digenrl.transports.ray.joining import open_cluster
try:
    cluster = open_cluster(ClusterSettings(address=sys.argv[1]))
    print("joined", len(cluster.resources().nodes))
    cluster.close()
except ConfigError as error:
    print(error)
"""


@contextmanager
def driver() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A driver with its own cluster, and the facts that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)


def join(address: str, **variables: str) -> str:
    """What another driver prints that tries to join."""
    answer = subprocess.run(
        [sys.executable, "-c", JOINER, address],
        env={**os.environ, LOOPBACK_ONLY: "0", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return answer.stdout.strip()


def test_a_started_cluster_is_private_and_ends_with_its_driver() -> None:
    with driver() as (process, facts):
        family = family_of(process.pid)
        assert Path(facts["folder"]).stat().st_mode & 0o777 == 0o700, "others cannot reach Ray's own folder in it"
        assert any(Path(facts["folder"]).glob("*/session_*/sockets/*"))
        sockets = listening(family)
        assert facts["worker"] in family and len(sockets) >= 5  # the head, its store, a worker...
        loopback = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1 as IPv4 and IPv6
        assert set(sockets.values()) <= loopback
        assert not facts["torch"] and facts["cpus"] >= 7
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": facts["token"]}
        assert join(facts["address"], **token) == "joined 1"
        for wrong in ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, {}):
            rejected = join(facts["address"], **wrong)
            assert rejected.startswith("cluster.address: ") and "RAY_AUTH_TOKEN" in rejected
        assert is_alive(facts["worker"]), "a driver that joined and left has ended nothing"
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: not any(is_alive(pid) for pid in family))
        until(lambda: not Path(facts["folder"]).exists())


def test_a_driver_that_closes_leaves_nothing_behind() -> None:
    with driver() as (process, facts):
        family = family_of(process.pid)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        assert json.loads(process.stdout.readline()) == []
        process.wait(30)
        assert not any(is_alive(pid) for pid in family)
        assert not Path(facts["folder"]).exists()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    check_private(tmp_path)
    tmp_path.chmod(0o711)
    with pytest.raises(ConfigError, match=r"other users .*711"):
        check_private(tmp_path)


def test_an_address_that_cannot_be_joined_is_explained_in_time() -> None:
    with (
        environment(RAY_ADDRESS="ray://head:10001"),
        pytest.raises(ConfigError, match=r"RAY_ADDRESS: 'ray://head"),
    ):
        open_cluster(ClusterSettings())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mute = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{mute} is not .*Ray cluster.* within 0.5 s"):
            open_cluster(ClusterSettings(address=mute, start_timeout_s=0.5))
    with pytest.raises(ConfigError, match=f"nothing answers at {mute} .*`ray start"):
        open_cluster(ClusterSettings(address=mute, start_timeout_s=0.5))
    with environment(RAY_ADDRESS=mute), pytest.raises(ConfigError, match=f"nothing answers at {mute}"):
        open_cluster(ClusterSettings(start_timeout_s=0.5))


def test_a_missing_token_is_an_error() -> None:
    nowhere = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/nonexistent"}
    with environment(**nowhere), pytest.raises(ConfigError, match=r"no token here; copy .*auth_token"):
        open_cluster(ClusterSettings(address="127.0.0.1:1"))


def test_a_cluster_of_another_ray_version_or_without_this_machine_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"Ray 1\.0 on Python 3\.8, this machine has Ray "):
        check_same_ray({"ray_version": "1.0", "python_version": "3.8.2"}, "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"this machine .*`ray start --address=10\.0\.0\.1:6379`"):
        check_is_member(["192.0.2.1"], "10.0.0.1:6379")
    check_is_member(["192.0.2.1", "127.0.0.1"], "10.0.0.1:6379")


def test_the_recorded_address_of_a_cluster_that_has_ended_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    with environment(RAY_TMPDIR=str(tmp_path)):
        assert find_local_cluster() is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        with environment(RAY_TMPDIR=str(tmp_path)):
            assert find_local_cluster() == address


def test_without_ray_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"'ray'.*digenrl\[ray\]"):
        open_cluster(ClusterSettings())
