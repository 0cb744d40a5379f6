"""Joins a Ray cluster or starts one on this machine, or explains in one line why it cannot. No torch.

A cluster that is started here listens on loopback only, requires a random token, and ends with its driver, even if
the driver is killed.
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

from digenrl.config.reading import ConfigError, one_line
from digenrl.config.recipes.cluster import ClusterSettings, host_and_port
from digenrl.transports.ray import cleanup
from digenrl.transports.ray.capacity import ClusterResources, NodeResources
from digenrl.transports.ray.internals import (
    LOOPBACK_ONLY,
    free_resources_by_node,
    gcs_client,
    has_token,
    reload_environment,
    silence_cluster_messages,
)

LOOPBACK = "127.0.0.1"
RETRY_INTERVAL_S = 0.2
MAX_TEMP_PATH_LENGTH = 38  # Ray's socket paths are inside, and may have at most 107 characters
ADVICE = "start one with `ray start --head --port=6379` and join it, or set cluster.address: local"


class RayCluster:
    """A cluster to which this process is connected. `address` is that of its head."""

    def __init__(self, address: str, started: _StartedCluster | None) -> None:
        self.address = address
        self._started = started

    @property
    def started_here(self) -> bool:
        """Whether this process has started the cluster, on its own machine."""
        return self._started is not None

    def resources(self) -> ClusterResources:
        """The machines that are alive, with their total and free resources."""
        import ray

        free = free_resources_by_node()
        nodes = (
            NodeResources(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["Resources"],
                free.get(node["NodeID"], {}),
                node["Labels"],
            )
            for node in ray.nodes()
            if node["Alive"]
        )
        return ClusterResources(tuple(nodes))

    def close(self) -> None:
        """Leaves the cluster, and ends it if it was started here. Safe to call twice."""
        import ray

        if ray.is_initialized():
            ray.shutdown()
        if self._started is not None:
            self._started.remove()


def open_cluster(settings: ClusterSettings, min_cpus: int = 0) -> RayCluster:
    """Joins or starts the cluster of the settings. Raises ConfigError if that is not possible.

    A cluster that is started here declares at least `min_cpus` CPUs; its workers share the real ones.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"mode: ray needs the package '{error.name}', which is not installed; install digenrl[ray]"
        ) from None
    address: str | None = settings.address
    if address == "auto":
        address = _environment_address() or find_local_cluster()
    if address in (None, "local"):
        return _start(min_cpus)
    return _join(address, settings.start_timeout_s)


def _environment_address() -> str | None:
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local"):
        return None
    try:
        host_and_port(address)
    except ValueError as error:
        raise ConfigError(f"RAY_ADDRESS: {error}") from None
    return address


def find_local_cluster() -> str | None:
    """The address that `ray start` recorded on this machine, if the cluster still answers."""
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with suppress(OSError, ValueError):
        address = (Path(root) / "ray" / "ray_current_cluster").read_text().strip()
        return address if _accepts_connections(*host_and_port(address), timeout_s=1.0) else None
    return None


# --- Starting ----------------------------------------------------------------------------------------------------


class _StartedCluster:
    """The folder, the environment variables and the cleanup process of a cluster that is started here.

    Ray makes its own folder writable for all users, and a user who replaces a socket in it can send messages.
    So it is inside of another `folder`, which other users cannot enter.
    """

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        self.folder = Path(
            tempfile.mkdtemp(prefix="digenrl-ray-", dir=parent if len(parent) < MAX_TEMP_PATH_LENGTH else "/tmp")
        )
        self.session = self.folder / "r"  # short, as it is part of the socket paths
        command = [sys.executable, "-I", cleanup.__file__, str(self.folder), str(os.getpid())]
        # In its own session, so that signals of a terminal do not reach it.
        self._cleanup = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._environment_before = set_ray_environment({**token, LOOPBACK_ONLY: "0"})

    def remove(self) -> None:
        """Ends all processes of the cluster and restores the environment. Safe to call twice."""
        if self._cleanup.stdin is None or self._cleanup.stdin.closed:
            return
        self._cleanup.stdin.close()
        self._cleanup.wait()
        set_ray_environment(self._environment_before)


def _start(min_cpus: int) -> RayCluster:
    import ray

    started = _StartedCluster()
    try:
        context = ray.init(
            address="local",
            num_cpus=max(min_cpus, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=LOOPBACK,
            _temp_dir=str(started.session),
        )
        check_private(started.folder)
    except Exception as error:  # Ray raises many kinds
        ray.shutdown()
        started.remove()
        raise ConfigError(
            f"cluster.address: Ray could not be started on this machine: {one_line(error)}"
        ) from error
    silence_cluster_messages()
    return RayCluster(context.address_info["gcs_address"], started)


def check_private(folder: Path) -> None:
    """Raises ConfigError unless the folder belongs to this user, and that no other user can enter it."""
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: other users can enter this folder (mode {found.st_mode & 0o777:o}), which has the sockets "
            "of the cluster; set TMPDIR to a folder of a file system that keeps permissions"
        )


def set_ray_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Sets environment variables, or removes those that are None, for Ray too; returns their previous values."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    reload_environment()
    return before


# --- Joining -----------------------------------------------------------------------------------------------------


def _join(address: str, timeout_s: float) -> RayCluster:
    """Checks everything that could go wrong first, because `ray.init` retries for a minute and explains less."""
    import ray

    if not has_token():
        raise ConfigError(
            "RAY_AUTH_MODE=token: there is no token here; copy the head's ~/.ray/auth_token to this machine, or "
            "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the cluster's token"
        )
    if not _accepts_connections(*host_and_port(address), timeout_s):
        raise ConfigError(f"cluster.address: nothing answers at {address} within {timeout_s:g} s; {ADVICE}")
    client = _call_with_timeout(lambda: gcs_client(address), address, timeout_s)
    metadata, hosts = _call_with_timeout(lambda: _started_cluster(client, timeout_s), address, timeout_s)
    check_same_ray(metadata, address)
    check_is_member(hosts, address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(f"cluster.address: cannot join {address}: {one_line(error)}; {ADVICE}") from error
    silence_cluster_messages()
    return RayCluster(address, None)


def _accepts_connections(host: str, port: int, timeout_s: float) -> bool:
    """Whether something listens there, or starts to within the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        with suppress(OSError), socket.create_connection((host, port), max(left_s, RETRY_INTERVAL_S)):
            return True
        if left_s <= RETRY_INTERVAL_S:
            return False
        time.sleep(RETRY_INTERVAL_S)


def _started_cluster(client: Any, timeout_s: float) -> tuple[Mapping[str, str], list[str]]:
    """What a cluster says about itself, and its machines. A head that is still starting says nothing yet."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        metadata = client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster")
        nodes = client.get_all_node_info().values()
        hosts = [node.node_manager_address for node in nodes if node.state == 0]
        if (metadata and hosts) or time.monotonic() > deadline_s:
            return json.loads(metadata or b"{}"), hosts
        time.sleep(RETRY_INTERVAL_S)


def _call_with_timeout(call: Callable[[], Any], address: str, timeout_s: float) -> Any:
    """The result of a call that may never return. Raises ConfigError if it fails or does not return in time."""
    import ray

    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # raised below, in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if results:
        return results[0]
    if errors and isinstance(errors[0], ray.exceptions.AuthenticationError):
        raise ConfigError(
            f"cluster.address: the cluster at {address} rejects this token; set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the cluster's token"
        )
    reason = one_line(errors[0]) if errors else f"no answer within {timeout_s:g} s"
    raise ConfigError(f"cluster.address: {address} is not a usable Ray cluster: {reason}; {ADVICE}")


def check_same_ray(metadata: Mapping[str, str], address: str) -> None:
    """Raises ConfigError if the cluster runs another version of Ray or Python."""
    import ray

    ours = (ray.__version__, ".".join(map(str, sys.version_info[:2])))
    theirs = (metadata.get("ray_version", "?"), ".".join(metadata.get("python_version", "?").split(".")[:2]))
    if ours != theirs:
        raise ConfigError(
            f"cluster.address: the cluster at {address} runs Ray {theirs[0]} on Python {theirs[1]}, this machine "
            f"has Ray {ours[0]} on Python {ours[1]}; install the same versions on all machines"
        )


def check_is_member(hosts: list[str], address: str) -> None:
    """Raises ConfigError if none of a cluster's machines is this one: a driver needs a local node."""
    if not any(_is_this_machine(host) for host in hosts):
        raise ConfigError(
            f"cluster.address: this machine is not one of the {len(hosts)} machines of the cluster at {address}; "
            f"run `ray start --address={address}` here first"
        )


def _is_this_machine(host: str) -> bool:
    """Only an address of this machine can be bound."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return True
    return False
