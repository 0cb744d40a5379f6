"""Whether a cluster's machines have room for a run's workers: arithmetic on plain records. Needs no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from digenrl.config.reading import ConfigError

ACCELERATOR = "accelerator_type:"  # Ray's resource of a machine that has such a card
ACCELERATOR_LABEL = "ray.io/accelerator-type"
COMMON = ("CPU", "memory", "object_store_memory")  # of every machine
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A machine of the cluster: all that it has, and what of it is free now."""

    id: str
    address: str
    resources: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def accelerators(self) -> frozenset[str]:
        """Ray's names of its cards."""
        named = {kind.removeprefix(ACCELERATOR) for kind in self.resources if kind.startswith(ACCELERATOR)}
        return frozenset(named | ({self.labels[ACCELERATOR_LABEL]} if ACCELERATOR_LABEL in self.labels else set()))


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The machines that are alive."""

    nodes: tuple[NodeFacts, ...]

    @property
    def has_gpus(self) -> bool:
        """Whether any machine has a card."""
        return any(node.resources.get("GPU", 0) > 0 for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Need:
    """Equal workers and what each of them takes. `who` is the key of the recipe that asks for them."""

    who: str
    count: int
    resources: Mapping[str, float]
    accelerator: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def each(self) -> str:
        """What one takes, for people."""
        parts = [f"{kind}: {amount:g}" for kind, amount in self.resources.items()]
        parts += [] if self.accelerator is None else [f"{ACCELERATOR}{self.accelerator}"]
        parts += [f"label {key}={value}" for key, value in self.labels.items()]
        return "{" + ", ".join(parts) + "}"

    def may_be_on(self, node: NodeFacts) -> bool:
        """Whether the machine is of the right kind, however full it is."""
        right_card = self.accelerator is None or self.accelerator in node.accelerators
        return right_card and all(node.labels.get(key) == value for key, value in self.labels.items())


class Packing:
    """What is left of machines while workers are put on them, one at a time."""

    def __init__(self, nodes: Sequence[NodeFacts], left: Mapping[str, Mapping[str, float]]) -> None:
        self._nodes = nodes
        self._left = {node.id: dict(left[node.id]) for node in nodes}

    def put(self, need: Need) -> str | None:
        """Takes a place for one worker and returns its machine's id; None where there is no room.

        Of several it is the one with the least that this worker does not ask for (a worker without a card leaves
        cards to others), then the fullest.
        """
        roomy = [node for node in self._nodes if need.may_be_on(node) and self._has_room(node, need)]
        if not roomy:
            return None
        node = min(roomy, key=lambda node: (self._wasted(node, need), self._left[node.id].get("CPU", 0)))
        left = self._left[node.id]
        for kind, amount in need.resources.items():
            left[kind] -= amount
        return node.id

    def _has_room(self, node: NodeFacts, need: Need) -> bool:
        left = self._left[node.id]
        return all(left.get(kind, 0) >= amount - ROUNDING for kind, amount in need.resources.items())

    def _wasted(self, node: NodeFacts, need: Need) -> tuple[float, float]:
        unasked = {kind: left for kind, left in self._left[node.id].items() if kind not in need.resources}
        return unasked.get("GPU", 0), sum(left for kind, left in unasked.items() if _is_special(kind))


def check_capacity(needs: Iterable[Need], cluster: ClusterFacts) -> None:
    """Raises ConfigError for the first need that cannot be met, alone or beside the others.

    What others use now may be free in a moment, and counts as room.
    """
    wanted = [need for need in needs if need.count]
    for need in wanted:
        _check_kinds(need, cluster)
    wanted.sort(key=lambda need: _scarcity(need, cluster))
    _check_room(wanted, cluster)


def _check_kinds(need: Need, cluster: ClusterFacts) -> None:
    """Some machine has to be right for one worker of this kind."""
    lacking = f"{need.who}: needs {need.each()}, but no machine of the cluster"
    cards = sorted({card for node in cluster.nodes for card in node.accelerators})
    if need.accelerator is not None and need.accelerator not in cards:
        raise ConfigError(f"{lacking} has the accelerator {need.accelerator}; {_known('accelerators', cards)}")
    for key, value in need.labels.items():
        if not any(node.labels.get(key) == value for node in cluster.nodes):
            raise ConfigError(f"{lacking} has the label {key}={value}; {_known('labels', _labels(cluster))}")
    fitting = [node for node in cluster.nodes if need.may_be_on(node)]
    if not fitting:
        raise ConfigError(
            f"{lacking} has all of these labels and accelerators; {_known('labels', _labels(cluster))}"
        )
    for kind, amount in need.resources.items():
        most = max(node.resources.get(kind, 0) for node in fitting)
        if most >= amount - ROUNDING:
            continue
        if most:
            raise ConfigError(f"{lacking} has so much of it; the most {kind} on one is {most:g}; use less")
        kinds = sorted({kind for node in cluster.nodes for kind in node.resources if _is_said(kind)})
        raise ConfigError(f"{lacking} that it may be on has any {kind}; {_known('resources', kinds)}")


def _check_room(needs: Sequence[Need], cluster: ClusterFacts) -> None:
    packing = Packing(cluster.nodes, {node.id: node.resources for node in cluster.nodes})
    for need in needs:
        fit = 0
        while fit < need.count and packing.put(need) is not None:
            fit += 1
        if fit < need.count:
            raise ConfigError(
                f"{need.who}: needs {need.count} x {need.each()}, room is for {fit}; "
                f"the cluster has {_has(need, cluster)}; add machines, or use fewer"
            )


def _has(need: Need, cluster: ClusterFacts) -> str:
    """What there is of the kinds that are asked for, on machines of the right kind."""
    nodes = [node for node in cluster.nodes if need.may_be_on(node)]
    amounts = {kind: sum(node.resources.get(kind, 0) for node in nodes) for kind in need.resources}
    if need.accelerator is not None and "GPU" in amounts:
        amounts = {need.accelerator: amounts.pop("GPU")} | amounts
    said = ", ".join(f"{amount:g} {kind}" for kind, amount in amounts.items()) or "room"
    return f"{said} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"


def _scarcity(need: Need, cluster: ClusterFacts) -> tuple[float, ...]:
    """Who has the least choice comes first, then who takes the most."""
    choices = sum(need.may_be_on(node) and _holds(node, need) for node in cluster.nodes)
    return (choices, -need.resources.get("GPU", 0), -sum(need.resources.values()))


def _holds(node: NodeFacts, need: Need) -> bool:
    return all(node.resources.get(kind, 0) >= amount - ROUNDING for kind, amount in need.resources.items())


def _is_special(kind: str) -> bool:
    return kind not in COMMON and not kind.startswith(("node:", ACCELERATOR))


def _is_said(kind: str) -> bool:
    return kind == "CPU" or _is_special(kind)


def _labels(cluster: ClusterFacts) -> list[str]:
    pairs = {(key, value) for node in cluster.nodes for key, value in node.labels.items()}
    return sorted(f"{key}={value}" for key, value in pairs if key != "ray.io/node-id")


def _known(what: str, found: Sequence[str]) -> str:
    return f"there are {', '.join(found)}" if found else f"there are no {what}"
