"""Joins a Ray cluster, or starts one on this machine, and says in one line why it could not. No torch.

A cluster that is started here listens on loopback alone, asks for a token that nobody else knows, and ends with
its driver, however that ends.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from digenrl.config.cluster import ClusterSettings
from digenrl.config.reading import ConfigError
from digenrl.transports.ray import cleanup as keeper
from digenrl.transports.ray.capacity import ClusterFacts, NodeFacts

LOOPBACK = "127.0.0.1"
# Ray calls its own that of other systems; set to 0, a node takes the loopback address, and only then its servers
# listen there alone.
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
PAUSE_S = 0.2
LONGEST_FOLDER = 40  # paths of Ray's sockets are in this folder, and may have 107 characters
ADVICE = "start one with `ray start --head --port=6379` and join it, or set cluster.address: local"


class RayCluster:
    """A cluster that this process is connected to. `address` is its head's."""

    def __init__(self, address: str, started: _Started | None) -> None:
        self.address = address
        self._started = started

    @property
    def is_ours(self) -> bool:
        """Whether it was started here, and ends with this process."""
        return self._started is not None

    def facts(self) -> ClusterFacts:
        """The machines that are alive, and what they have."""
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return ClusterFacts(
            tuple(
                NodeFacts(
                    node["NodeID"],
                    node["NodeManagerAddress"],
                    node["Resources"],
                    free.get(node["NodeID"], {}),
                    node["Labels"],
                )
                for node in ray.nodes()
                if node["Alive"]
            )
        )

    def close(self) -> None:
        """Leaves the cluster; one that was started here is ended. May be called twice."""
        import ray

        if ray.is_initialized():
            ray.shutdown()
        if self._started is not None:
            self._started.remove()


def open_cluster(settings: ClusterSettings, cpus: int = 0) -> RayCluster:
    """The cluster of the settings; raises ConfigError if there is none that can be joined.

    One that is started here counts at least so many CPUs: a run's workers share the real ones.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"mode: ray needs the package '{error.name}', which is not installed; install digenrl[ray]"
        ) from None
    if settings.address == "local":
        return _start(cpus)
    if settings.address != "auto":
        return _join(settings.address, settings.start_timeout_s)
    told = os.environ.get("RAY_ADDRESS", "")
    if told not in ("", "auto", "local"):
        return _join(told, settings.start_timeout_s)
    found = _cluster_of_this_machine()
    return _start(cpus) if found is None else _join(found, settings.start_timeout_s)


# --- Starting ----------------------------------------------------------------------------------------------------


class _Started:
    """What a cluster that is started here leaves in this process and on disk, and how it goes away."""

    def __init__(self) -> None:
        place = tempfile.gettempdir()
        self.folder = Path(
            tempfile.mkdtemp(prefix="digenrl-ray-", dir=place if len(place) < LONGEST_FOLDER else "/tmp")
        )
        command = [sys.executable, "-I", keeper.__file__, str(self.folder), str(os.getpid())]
        # In a session of its own: what a terminal tells the driver is not meant for it.
        self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._before = _set_environment({**token, LOOPBACK_ONLY: "0"})
        _read_environment_again()

    def remove(self) -> None:
        """Whatever still runs is ended; the environment is as before."""
        if self._keeper.stdin is None or self._keeper.stdin.closed:
            return
        self._keeper.stdin.close()
        self._keeper.wait()
        _set_environment(self._before)
        _read_environment_again()


def _start(cpus: int) -> RayCluster:
    import ray

    started = _Started()
    try:
        context = ray.init(
            address="local",
            num_cpus=max(cpus, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=LOOPBACK,
            _temp_dir=str(started.folder),
        )
    except Exception as error:  # of many kinds; whatever it is, there is no cluster
        started.remove()
        raise ConfigError(
            f"cluster.address: no Ray could be started on this machine: {_one_line(error)}"
        ) from error
    _be_quiet()
    return RayCluster(context.address_info["gcs_address"], started)


def _set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Sets variables, or takes them away; returns what they were."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def _read_environment_again() -> None:
    """Ray reads some variables once, when it is imported, and keeps a token that it has seen."""
    import ray

    ray._private.ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(LOOPBACK_ONLY, "1") != "0"
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


# --- Joining -----------------------------------------------------------------------------------------------------


def _join(address: str, timeout_s: float) -> RayCluster:
    """Asks everything that could go wrong before Ray does: Ray waits for up to a minute and then says less."""
    import ray

    host, port = _host_and_port(address)
    if not _answers(host, port, timeout_s):
        raise ConfigError(f"cluster.address: nothing answers at {address}, tried for {timeout_s:g} s; {ADVICE}")
    client = _in_time(lambda: _gcs_client(address), address, timeout_s)
    _check_same_ray(_in_time(lambda: _metadata(client), address, timeout_s), address)
    _check_is_member(_in_time(client.get_all_node_info, address, timeout_s), address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"cluster.address: {address} could not be joined: {_one_line(error)}; {ADVICE}"
        ) from error
    _be_quiet()
    return RayCluster(address, None)


def _cluster_of_this_machine() -> str | None:
    """Where `ray start` noted its cluster, if that still answers."""
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with suppress(OSError, ConfigError):
        address = (Path(root) / "ray" / "ray_current_cluster").read_text().strip()
        return address if _answers(*_host_and_port(address), timeout_s=1.0) else None
    return None


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"cluster.address: '{address}' is neither auto, local nor HOST:PORT, as 10.0.0.1:6379")
    return host.strip("[]"), int(port)


def _answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether something listens there, or begins to in this time."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        with suppress(OSError), socket.create_connection((host, port), max(left_s, PAUSE_S)):
            return True
        if left_s <= PAUSE_S:
            return False
        time.sleep(PAUSE_S)


def _in_time(ask: Callable[[], Any], address: str, timeout_s: float) -> Any:
    """The answer of a call that may never return; it is left alone then."""
    import ray

    answers: list[Any] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # raised below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if answers:
        return answers[0]
    if errors and isinstance(errors[0], ray.exceptions.AuthenticationError):
        raise ConfigError(
            f"cluster.address: the cluster at {address} does not take this token; set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to that of the cluster"
        )
    reason = _one_line(errors[0]) if errors else f"it said nothing for {timeout_s:g} s"
    raise ConfigError(
        f"cluster.address: what answers at {address} is no Ray cluster that can be used: {reason}; {ADVICE}"
    )


def _gcs_client(address: str) -> Any:
    import ray

    return ray._raylet.GcsClient(address=address)


def _metadata(client: Any) -> dict[str, str]:
    content = client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster")
    metadata: dict[str, str] = json.loads(content or b"{}")
    return metadata


def _check_same_ray(metadata: Mapping[str, str], address: str) -> None:
    import ray

    ours = (ray.__version__, ".".join(map(str, sys.version_info[:2])))
    theirs = (metadata.get("ray_version", "?"), ".".join(metadata.get("python_version", "?").split(".")[:2]))
    if ours != theirs:
        raise ConfigError(
            f"cluster.address: the cluster at {address} runs Ray {theirs[0]} on Python {theirs[1]}, this machine "
            f"has Ray {ours[0]} on Python {ours[1]}; install the same on all machines"
        )


def _check_is_member(nodes: Mapping[Any, Any], address: str) -> None:
    """A driver needs a node of the cluster on its own machine."""
    alive = [node.node_manager_address for node in nodes.values() if node.state == 0]
    if not any(_is_here(host) for host in alive):
        raise ConfigError(
            f"cluster.address: {address} is a cluster of {len(alive)} machines, but this one is not among them; "
            f"run `ray start --address={address}` here first"
        )


def _is_here(host: str) -> bool:
    """Only an address of this machine can be bound."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return True
    return False


def _be_quiet() -> None:
    """What Ray would print of machines and processes that went away, a run tells in its own way."""
    import ray

    ray._private.worker._worker_logs_enabled = False


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
