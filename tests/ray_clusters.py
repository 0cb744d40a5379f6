"""Real Ray clusters of several nodes on this machine, and workers without models to put on them."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from digenrl.worker.orders import (
    LayOutWeights,
    LoadWeights,
    Order,
    OrderFailed,
    Ready,
    Report,
    WeightsLaidOut,
    WeightsLoaded,
    weights_name,
)
from fake_crew import fake_recipe

from digenrl.config.cluster import ClusterSettings
from digenrl.config.recipe import Recipe
from digenrl.transports.contract import Message, Transport
from digenrl.transports.ray.joining import LOOPBACK, LOOPBACK_ONLY, RayCluster, open_cluster
from digenrl.worker.assignment import Assignment

if TYPE_CHECKING:
    from torch import Tensor

    from digenrl.exchange.tensors import Exchange

TOKEN = "of-the-tests-" + "0" * 32
TESTS = str(Path(__file__).parent)
STORE_BYTES = 120 << 20
QUICK_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


# --- Clusters ----------------------------------------------------------------------------------------------------


class SeveralNodes:
    """A cluster of nodes that are processes of this machine, on loopback, with a token."""

    def __init__(self, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        arguments = {"_system_config": QUICK_CHECKS, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=_node(head) | arguments)

    @property
    def address(self) -> str:
        """HOST:PORT."""
        address: str = self._cluster.address
        return address

    def add(self, **node: Any) -> Any:
        """Another machine."""
        return self._cluster.add_node(**_node(node))

    def kill(self, node: Any) -> None:
        """A machine goes away without a word."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """Everything ends."""
        self._cluster.shutdown()


def _node(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"node_ip_address": LOOPBACK, "object_store_memory": STORE_BYTES, "num_cpus": 1, **arguments}


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """These variables, for a while; Ray sees them at once."""
    from digenrl.transports.ray import joining

    before = joining._set_environment(values)
    joining._read_environment_again()
    try:
        yield
    finally:
        joining._set_environment(before)
        joining._read_environment_again()


@contextmanager
def nodes_alone(**head: Any) -> Iterator[SeveralNodes]:
    """A cluster that nobody has joined."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-tests-", ignore_cleanup_errors=True) as folder,
        environment(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=TOKEN,
            RAY_TMPDIR=folder,
            PYTHONPATH=TESTS,
            **{LOOPBACK_ONLY: "0"},
        ),
    ):
        nodes = SeveralNodes(**head)
        try:
            yield nodes
        finally:
            nodes.close()


@contextmanager
def several_nodes(**head: Any) -> Iterator[tuple[SeveralNodes, RayCluster]]:
    """A cluster that this process has joined."""
    with nodes_alone(**head) as nodes:
        cluster = open_cluster(ClusterSettings(address=nodes.address))
        try:
            yield nodes, cluster
        finally:
            cluster.close()


def stored_bytes(node_id: str) -> int:
    """How much the object store of a node holds."""
    import ray
    from ray._private.internal_api import node_stats

    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    used: int = stats.store_stats.object_store_bytes_used
    return used


# --- Processes ---------------------------------------------------------------------------------------------------


def family_of(pid: int) -> list[int]:
    """A process and all that came of it."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        parent = _stat(int(process.name))[1]
        children.setdefault(int(parent), []).append(int(process.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    return _stat(pid)[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def listening(pids: Sequence[int]) -> dict[str, str]:
    """The addresses on which processes listen, in hexadecimal, and what each process is."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()
            if state == "0A":
                sockets[line.split()[9]] = local.partition(":")[0]
    found = {}
    for pid in pids:
        for descriptor in _descriptors(pid):
            socket = re.fullmatch(r"socket:\[(\d+)\]", descriptor)
            if socket and socket[1] in sockets:
                found[f"{pid}/{socket[1]}"] = sockets[socket[1]]
    return found


def _descriptors(pid: int) -> list[str]:
    try:
        return [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


# --- Workers without models --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leave(Order):
    """Leaves so many numbers under a name, beginning with `first`. Completed by Did."""

    name: str
    numbers: int
    first: float = 0.0

    def leaves(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}-never")


@dataclass(frozen=True, slots=True)
class AddUp(Order):
    """Adds up what lies under some names. Completed by Did with the sum."""

    names: tuple[str, ...]

    def reads(self) -> tuple[str, ...]:
        return self.names


@dataclass(frozen=True, slots=True)
class Sleep(Order):
    """Completed by Did, after a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LookAround(Order):
    """Completed by Saw."""


@dataclass(frozen=True, slots=True)
class Did(Report):
    """Done; `value` is what came of it."""

    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Saw(Report):
    """What a worker is told by its surroundings."""

    rendezvous: str
    threads: str
    cards: str


def _weights(version: int) -> Tensor:
    import torch

    return torch.full((1000,), float(version))


def sum_of_weights(version: int) -> float:
    """What a worker that loaded them says in place of seconds."""
    return 1000.0 * version


class Abacus:
    """A worker that adds up."""

    def __init__(self, assignment: Assignment, exchange: Exchange, rendezvous: str) -> None:
        self._exchange, self._rendezvous = exchange, rendezvous
        print(f"{assignment.name} is here", flush=True)

    def handle(self, order: Order) -> Report:
        """What each order comes to; what goes wrong is a report, too."""
        try:
            return self._carry_out(order)
        except Exception as error:
            return OrderFailed(order, str(error))

    def _carry_out(self, order: Order) -> Report:  # noqa: PLR0911
        match order:
            case Leave(name, numbers, first):
                import torch  # as late as real workers do: its process has to be quick to start

                self._exchange.put(name, {"numbers": torch.arange(numbers, dtype=torch.float64) + first})
                return Did()
            case AddUp(names):
                return Did(sum(self._exchange.get(name)["numbers"].sum().item() for name in names))
            case LayOutWeights(version=version):
                weights = {"numbers": _weights(version)}
                return WeightsLaidOut(version, self._exchange.put_weights(weights_name(version), weights))
            case LoadWeights(version, weights):
                return WeightsLoaded(version, self._exchange.get_weights(weights)["numbers"].sum().item())
            case Sleep(seconds):
                time.sleep(seconds)
                return Did()
            case LookAround():
                threads, cards = os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES", "all")
                return Saw(self._rendezvous, threads, cards)
        return OrderFailed(order, "unknown")


def build_abacus(assignment: Assignment, exchange: Exchange, rendezvous: str) -> tuple[Abacus, Report]:
    """Any assignment is one of an abacus."""
    return Abacus(assignment, exchange, rendezvous), Ready()


def cluster_recipe(**changes: Any) -> Recipe:
    """A recipe of mode ray with adapters, as far as a transport reads it."""
    training = {"lora": {"rank": 2, "alpha": 4}}
    return fake_recipe(
        **{"mode": "ray", "lanes": {"generators": 1, "device": "cpu"}, "training": training} | changes
    )


def wait_for(transport: Transport, count: int, patience_s: float = 30.0) -> list[Message]:
    """So many messages, in the order in which they came."""
    messages: list[Message] = []
    deadline_s = time.monotonic() + patience_s
    while len(messages) < count:
        assert time.monotonic() < deadline_s, f"waited for {count} messages, got {messages}"
        messages += transport.receive(1.0)
    return messages


def until(true: Callable[[], Any], patience_s: float = 20.0) -> Any:
    """Waits until something is true, and returns it."""
    deadline_s = time.monotonic() + patience_s
    while not (found := true()):
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.1)
    return found
