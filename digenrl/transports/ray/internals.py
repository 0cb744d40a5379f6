"""Everything that DigenRL uses of Ray beyond its public API, in one place. It pins Ray to one minor version."""

from __future__ import annotations

import os
from typing import Any

# Ray means it for other systems. If it is 0, a node takes the loopback address, and its servers listen there only.
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def reload_environment() -> None:
    """Makes Ray read its environment variables again, which it does only at import, and forget a cached token."""
    import ray

    ray._private.ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(LOOPBACK_ONLY, "1") != "0"
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def silence_cluster_messages() -> None:
    """Stops Ray from printing when nodes or processes end, which a run reports itself."""
    import ray

    ray._private.worker._worker_logs_enabled = False


def has_token() -> bool:
    """Whether there is a token, or none is required. A client without one aborts its process."""
    import ray
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled

    try:
        ensure_token_if_auth_enabled(create_token_if_missing=False)
    except ray.exceptions.AuthenticationError:
        return False
    return True


def gcs_client(address: str) -> Any:
    """A client of a cluster's head, for questions before the cluster is joined."""
    import ray

    return ray._raylet.GcsClient(address=address)


def free_resources_by_node() -> dict[str, dict[str, float]]:
    """Free resources by node id. The public API has free resources only for the whole cluster."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return free


def has_process(actor: Any) -> bool:
    """Whether an actor has a process. The public state API needs the dashboard, which may not be running."""
    from ray._private.state import actors

    return bool(actors(actor._actor_id.hex()).get("Pid"))
