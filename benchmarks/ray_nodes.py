"""A Ray cluster with several nodes on this machine, for benchmarks. Its nodes are processes on loopback."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOOPBACK = "127.0.0.1"
HEALTH_CHECKS = {  # a lost node is detected within seconds
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class RayCluster:
    """A cluster to which nodes can be added, and whose nodes can be killed."""

    def __init__(self, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        given = {"node_ip_address": LOOPBACK, "include_dashboard": False, "_system_config": HEALTH_CHECKS, **head}
        self._cluster = Cluster(initialize_head=True, head_node_args=given)

    @property
    def address(self) -> str:
        """The address of the head node, as HOST:PORT."""
        address: str = self._cluster.address
        return address

    def add(self, **node: Any) -> Any:
        """Adds a node."""
        return self._cluster.add_node(node_ip_address=LOOPBACK, **node)

    def kill(self, node: Any) -> None:
        """Kills a node without a graceful shutdown."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """Shuts down all nodes."""
        self._cluster.shutdown()


@contextmanager
def ray_cluster(**head: Any) -> Iterator[RayCluster]:
    """Starts a cluster with a head node. Sets environment variables, which must happen before Ray is imported."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(16).hex(),
            "RAY_TMPDIR": folder,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
            "RAY_BACKEND_LOG_LEVEL": "error",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # 15 by default, with which workers hardly run on a busy machine
        }
        cluster = RayCluster(**head)
        try:
            yield cluster
        finally:
            cluster.close()
