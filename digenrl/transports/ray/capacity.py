"""Checks whether the machines of a cluster have room for a run's workers. Works on plain records, without Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from digenrl.config.reading import ConfigError

ACCELERATOR_PREFIX = "accelerator_type:"  # of a Ray resource that names the type of a machine's GPUs
ACCELERATOR_LABEL = "ray.io/accelerator-type"
COMMON_RESOURCES = ("CPU", "memory", "object_store_memory")  # every machine has these
TOLERANCE = 1e-9  # fractions of a GPU add up with rounding errors


@dataclass(frozen=True, slots=True)
class NodeResources:
    """One machine of a cluster, with its total and its free resources."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def accelerators(self) -> frozenset[str]:
        """Ray's names of its GPU types."""
        named = {
            kind.removeprefix(ACCELERATOR_PREFIX) for kind in self.total if kind.startswith(ACCELERATOR_PREFIX)
        }
        return frozenset(named | {value for key, value in self.labels.items() if key == ACCELERATOR_LABEL})


@dataclass(frozen=True, slots=True)
class ClusterResources:
    """The machines of a cluster that are alive."""

    nodes: tuple[NodeResources, ...]

    @property
    def has_gpus(self) -> bool:
        """Whether any machine has a GPU."""
        return any(node.total.get("GPU", 0) > 0 for node in self.nodes)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What each of `count` equal workers takes. `key` is the recipe's key that asks for them."""

    key: str
    count: int
    resources: Mapping[str, float]
    accelerator: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """What one worker takes, for messages."""
        parts = [f"{kind}: {amount:g}" for kind, amount in self.resources.items()]
        parts += [] if self.accelerator is None else [f"{ACCELERATOR_PREFIX}{self.accelerator}"]
        parts += [f"label {key}={value}" for key, value in self.labels.items()]
        return "{" + ", ".join(parts) + "}"

    def matches(self, node: NodeResources) -> bool:
        """Whether the machine has the accelerator and the labels, however full it is."""
        accelerator_matches = self.accelerator is None or self.accelerator in node.accelerators
        return accelerator_matches and all(node.labels.get(key) == value for key, value in self.labels.items())

    def fits(self, available: Mapping[str, float]) -> bool:
        """Whether one worker finds enough of everything."""
        return all(available.get(kind, 0) >= amount - TOLERANCE for kind, amount in self.resources.items())


class FreeResources:
    """What is left on each machine while workers are placed, one at a time."""

    def __init__(self, nodes: Sequence[NodeResources], free: Mapping[str, Mapping[str, float]]) -> None:
        self._nodes = nodes
        self._free = {node.id: dict(free[node.id]) for node in nodes}

    def reserve(self, request: ResourceRequest) -> str | None:
        """Takes the resources of one worker; returns the id of its machine, or None if no machine has room.

        Prefers the machine with the fewest resources that this worker does not use, so that a worker without a
        GPU leaves GPUs to others, and among these the fullest.
        """
        suitable = [node for node in self._nodes if request.matches(node) and request.fits(self._free[node.id])]
        if not suitable:
            return None
        node = min(suitable, key=lambda node: (*self._unused(node, request), self._free[node.id].get("CPU", 0)))
        for kind, amount in request.resources.items():
            self._free[node.id][kind] -= amount
        return node.id

    def _unused(self, node: NodeResources, request: ResourceRequest) -> tuple[float, float]:
        """Free GPUs, and other special resources, that the request does not ask for."""
        unused = {kind: free for kind, free in self._free[node.id].items() if kind not in request.resources}
        return unused.get("GPU", 0), sum(free for kind, free in unused.items() if _is_special(kind))


def check_capacity(requests: Iterable[ResourceRequest], cluster: ClusterResources) -> None:
    """Raises ConfigError for the first request that does not fit, by itself or together with the others.

    Counts total resources, since what other jobs use now may soon be free.
    """
    wanted = [request for request in requests if request.count]
    for request in wanted:
        _check_kinds(request, cluster)
    wanted.sort(key=lambda request: _scarcity(request, cluster))
    free = FreeResources(cluster.nodes, {node.id: node.total for node in cluster.nodes})
    for request in wanted:
        placed = 0
        while placed < request.count and free.reserve(request) is not None:
            placed += 1
        if placed < request.count:
            raise ConfigError(
                f"{request.key}: needs {request.count} x {request.describe()}, but there is room for {placed}; "
                f"the cluster has {_available(request, cluster)}; add machines, or use fewer"
            )


def _check_kinds(request: ResourceRequest, cluster: ClusterResources) -> None:
    """Raises ConfigError if no machine of the cluster, were it empty, could run one worker."""
    problem = f"{request.key}: needs {request.describe()}, but no machine of the cluster"
    accelerators = sorted({each for node in cluster.nodes for each in node.accelerators})
    labels = _labels(cluster)
    if request.accelerator is not None and request.accelerator not in accelerators:
        raise ConfigError(f"{problem} has the accelerator {request.accelerator}; {_known(accelerators)}")
    for key, value in request.labels.items():
        if not any(node.labels.get(key) == value for node in cluster.nodes):
            raise ConfigError(f"{problem} has the label {key}={value}; {_known(labels)}")
    matching = [node for node in cluster.nodes if request.matches(node)]
    if not matching:
        raise ConfigError(f"{problem} has all of these labels and accelerators; {_known(labels)}")
    for kind, amount in request.resources.items():
        most = max(node.total.get(kind, 0) for node in matching)
        if most >= amount - TOLERANCE:
            continue
        if most:
            raise ConfigError(f"{problem} has enough {kind}; the most on one machine is {most:g}; use less")
        kinds = {kind for node in cluster.nodes for kind in node.total if kind == "CPU" or _is_special(kind)}
        raise ConfigError(f"{problem} that matches has any {kind}; {_known(sorted(kinds))}")


def _available(request: ResourceRequest, cluster: ClusterResources) -> str:
    """Totals of the requested resources on matching machines, for messages."""
    nodes = [node for node in cluster.nodes if request.matches(node)]
    amounts = {kind: sum(node.total.get(kind, 0) for node in nodes) for kind in request.resources}
    if request.accelerator is not None and "GPU" in amounts:
        amounts = {request.accelerator: amounts.pop("GPU")} | amounts
    listed = ", ".join(f"{amount:g} {kind}" for kind, amount in amounts.items()) or "room"
    return f"{listed} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"


def _scarcity(request: ResourceRequest, cluster: ClusterResources) -> tuple[float, ...]:
    """Sort key: requests with the fewest suitable machines first, then the largest."""
    suitable = sum(request.matches(node) and request.fits(node.total) for node in cluster.nodes)
    return (suitable, -request.resources.get("GPU", 0), -sum(request.resources.values()))


def _is_special(kind: str) -> bool:
    return kind not in COMMON_RESOURCES and not kind.startswith(("node:", ACCELERATOR_PREFIX))


def _labels(cluster: ClusterResources) -> list[str]:
    pairs = {(key, value) for node in cluster.nodes for key, value in node.labels.items()}
    return sorted(f"{key}={value}" for key, value in pairs if key != "ray.io/node-id")


def _known(names: Sequence[str]) -> str:
    return f"known: {', '.join(names) or 'none'}"
