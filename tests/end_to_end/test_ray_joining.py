"""Joining a cluster and starting one: who may connect, what is told when it cannot be, and what is left."""

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

from digenrl.config.cluster import ClusterSettings
from digenrl.config.reading import ConfigError
from digenrl.transports.ray import joining
from digenrl.transports.ray.joining import LOOPBACK_ONLY, open_cluster

# A driver that has a cluster of its own and a worker on it; it says where, and closes when it is told to.
DRIVER = """
import json, os, sys
from digenrl.config.cluster import ClusterSettings
from digenrl.transports.ray.joining import open_cluster
cluster = open_cluster(ClusterSettings(address="local"), cpus=7)
import ray
worker = ray.remote(type("Worker", (), {"pid": lambda self: os.getpid()})).remote()
facts = {"address": cluster.address, "worker": ray.get(worker.pid.remote()), "torch": "torch" in sys.modules,
         "folder": str(cluster._started.folder), "token": os.environ["RAY_AUTH_TOKEN"],
         "cpus": cluster.facts().nodes[0].resources["CPU"]}
print(json.dumps(facts), flush=True)
sys.stdin.read()
cluster.close()
print(json.dumps(sorted(name for name in os.environ if name.startswith("RAY_AUTH"))), flush=True)
"""
# One that joins it, or is refused.
JOINER = """
import sys
from digenrl.config.cluster import ClusterSettings
from digenrl.config.reading import ConfigError
from digenrl.transports.ray.joining import open_cluster
try:
    cluster = open_cluster(ClusterSettings(address=sys.argv[1]))
    print("joined", len(cluster.facts().nodes), cluster.is_ours)
    cluster.close()
except ConfigError as error:
    print(error)
"""


@contextmanager
def driver() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A driver with a cluster of its own, and what it says."""
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
    """What another driver says that wants to join."""
    answer = subprocess.run(
        [sys.executable, "-c", JOINER, address],
        env={**os.environ, LOOPBACK_ONLY: "0", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return answer.stdout.strip()


def test_a_cluster_that_is_started_here_is_private_and_ends_with_its_driver() -> None:
    with driver() as (process, facts):
        family = family_of(process.pid)
        sockets = listening(family)
        assert facts["worker"] in family and len(sockets) >= 5  # the head, its store, a worker...
        assert set(sockets.values()) <= {
            "0100007F",
            "0000000000000000FFFF00000100007F",
        }  # 127.0.0.1, as IPv4 and 6
        assert not facts["torch"] and facts["cpus"] >= 7
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": facts["token"]}
        assert join(facts["address"], **token) == "joined 1 False"
        refused = f"cluster.address: the cluster at {facts['address']} does not take this token; set RAY_AUTH_MODE"
        assert join(facts["address"], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64).startswith(refused)
        assert join(facts["address"]).startswith(refused)
        assert is_alive(facts["worker"])  # who only joined has ended nothing by leaving
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


def test_what_cannot_be_joined_is_told_in_one_line_and_in_time() -> None:
    with pytest.raises(ConfigError, match=r"'head' is neither auto, local nor HOST:PORT"):
        open_cluster(ClusterSettings(address="head"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mute = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"what answers at {mute} is no Ray cluster .* said nothing for 0.5 s"
        ):
            open_cluster(ClusterSettings(address=mute, start_timeout_s=0.5))
    with pytest.raises(
        ConfigError, match=f"nothing answers at {mute}, tried for 0.5 s; start one with `ray start"
    ):
        open_cluster(ClusterSettings(address=mute, start_timeout_s=0.5))
    with (
        environment(RAY_ADDRESS=mute),
        pytest.raises(ConfigError, match=f"nothing answers at {mute}"),
    ):
        open_cluster(ClusterSettings(start_timeout_s=0.5))


def test_a_cluster_of_another_ray_or_of_other_machines_is_told_as_such() -> None:
    with pytest.raises(
        ConfigError, match=r"runs Ray 1\.0 on Python 3\.8, this machine has Ray .*; install the same"
    ):
        joining._check_same_ray({"ray_version": "1.0", "python_version": "3.8.2"}, "10.0.0.1:6379")
    elsewhere = type("Node", (), {"node_manager_address": "192.0.2.1", "state": 0})
    with pytest.raises(ConfigError, match="this one is not among them; run `ray start --address=10"):
        joining._check_is_member({"a": elsewhere}, "10.0.0.1:6379")


def test_a_note_of_a_cluster_that_has_ended_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    with environment(RAY_TMPDIR=str(tmp_path)):
        assert joining._cluster_of_this_machine() is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        with environment(RAY_TMPDIR=str(tmp_path)):
            assert joining._cluster_of_this_machine() == address


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigError, match=r"needs the package 'ray', which is not installed; install digenrl\[ray\]"
    ):
        open_cluster(ClusterSettings())
