"""Several machines on this one, for benchmarks: nodes of a Ray cluster that are processes, on loopback."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOOPBACK = "127.0.0.1"
CHECKS = {  # a lost machine is noticed within seconds
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class Nodes:
    """Machines that come and go."""

    def __init__(self, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        given = {"node_ip_address": LOOPBACK, "include_dashboard": False, "_system_config": CHECKS, **head}
        self._cluster = Cluster(initialize_head=True, head_node_args=given)

    @property
    def address(self) -> str:
        """HOST:PORT."""
        address: str = self._cluster.address
        return address

    def add(self, **node: Any) -> Any:
        """Another machine."""
        return self._cluster.add_node(node_ip_address=LOOPBACK, **node)

    def kill(self, node: Any) -> None:
        """A machine goes away without a word."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """All end."""
        self._cluster.shutdown()


@contextmanager
def several(**head: Any) -> Iterator[Nodes]:
    """A cluster with one machine, to which others can be added. Ray is imported with these variables set."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(16).hex(),
            "RAY_TMPDIR": folder,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback alone
            "RAY_BACKEND_LOG_LEVEL": "error",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        nodes = Nodes(**head)
        try:
            yield nodes
        finally:
            nodes.close()
