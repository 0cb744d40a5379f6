"""`digenrl probe`: measures the links between the machines of a Ray cluster, and proposes a cluster file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from digenrl.config.reading import parse_model
from digenrl.config.recipes.cluster import ClusterSettings
from digenrl.planning.sites.proposal import ProbedMachine, proposal_text, proposed_cluster
from digenrl.telemetry.writing import write_atomically
from digenrl.transports.ray.capacity import NodeResources
from digenrl.transports.ray.joining import open_cluster
from digenrl.transports.ray.link_probe import machine_name, measure_links


@dataclass(frozen=True, slots=True)
class ProbedCluster:
    """The machines of a cluster and the gbit/s between them."""

    machines: tuple[ProbedMachine, ...]
    links: dict[frozenset[str], float]

    def summary(self) -> str:
        """What was found, in one line."""
        if len(self.machines) == 1:
            return "This cluster has one machine: there is no link to measure, and there are no sites."
        sites = proposed_cluster(self.machines, self.links).get("sites", [])
        names = sorted({name for link in sites for name in link["between"]})
        found = f"{len(names)} sites: {', '.join(names)}" if sites else "one site"
        slowest, fastest = min(self.links.values()), max(self.links.values())
        return f"{len(self.machines)} machines, links of {slowest:.3g} to {fastest:.3g} Gbit/s: {found}."


def read_address(address: str) -> ClusterSettings:
    """The settings of the cluster at an address; raises ConfigError if it is none."""
    return parse_model(ClusterSettings, {"address": address})


def probe_cluster(settings: ClusterSettings, notify: Callable[[str], None]) -> ProbedCluster:
    """Joins the cluster and measures all its links."""
    cluster = open_cluster(settings)
    try:
        nodes = cluster.resources().nodes
        return ProbedCluster(tuple(_machine(node) for node in nodes), measure_links(nodes, notify))
    finally:
        cluster.close()


def write_proposal(probed: ProbedCluster, path: Path) -> None:
    """Writes the proposed cluster file."""
    write_atomically(path, proposal_text(probed.machines, probed.links))


def _machine(node: NodeResources) -> ProbedMachine:
    accelerator = min(node.accelerators, default=None)
    return ProbedMachine(machine_name(node), accelerator, int(node.total.get("GPU", 0)), node.labels)
