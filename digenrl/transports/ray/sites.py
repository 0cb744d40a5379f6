"""The sites of a cluster: machines that are close together, by their Ray label. Works without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.cluster import SITE_LABEL
from digenrl.transports.ray.capacity import ClusterResources, ResourceRequest


class Sites:
    """Finds the site of a machine. One without the label, or that has left, is in no site.

    `resources` is asked again for a machine that is not known yet, since machines may join during a run.
    """

    def __init__(self, resources: Callable[[], ClusterResources]) -> None:
        self._resources = resources
        self._sites: dict[str, str] = {}  # by the id of the machine

    def beyond_a_link(self, node_id: str | None, source_id: str | None) -> str:
        """The site of a machine that is not in the site of the source; empty if it is, or if it is in no site."""
        site = self._of(node_id)
        return "" if site == self._of(source_id) else site

    def _of(self, node_id: str | None) -> str:
        if node_id is None:
            return ""
        if node_id not in self._sites:
            found = {node.id: node.labels.get(SITE_LABEL, "") for node in self._resources().nodes}
            self._sites = {node_id: ""} | self._sites | found
        return self._sites[node_id]


def check_site_labels(requests: Iterable[ResourceRequest], cluster: ClusterResources) -> None:
    """Raises ConfigError if only some of the machines that may run these workers have a site."""
    wanted = list(requests)
    nodes = [
        node
        for node in cluster.nodes
        if any(request.matches(node) and request.fits(node.total) for request in wanted)
    ]
    sites = sorted({node.labels[SITE_LABEL] for node in nodes if node.labels.get(SITE_LABEL)})
    without = next((node for node in nodes if not node.labels.get(SITE_LABEL)), None)
    if sites and without is not None:
        raise ConfigError(
            f"cluster: the machine {without.address} may run generators or the trainer and has no label "
            f"{SITE_LABEL}, but others have ({', '.join(sites)}); start Ray there with `--labels "
            f"{SITE_LABEL}=NAME`, or on all machines without this label"
        )
