"""Ray clusters of several nodes on this machine, and workers without models to run on them."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fake_recipes import fake_recipe

from digenrl.config.recipes.cluster import ClusterSettings
from digenrl.config.recipes.recipe import Recipe
from digenrl.records import Export, Exported, Job, JobFailed, Publish, Published, Result, weights_name
from digenrl.transports.contract import Message, Report, Transport
from digenrl.transports.ray.internals import LOOPBACK_ONLY
from digenrl.transports.ray.joining import LOOPBACK, RayCluster, open_cluster, set_ray_environment
from digenrl.worker.assignment import Assignment, Ready

if TYPE_CHECKING:
    from torch import Tensor

    from digenrl.exchange.tensors import Exchange

TOKEN = "of-the-tests-" + "0" * 32
TESTS = str(Path(__file__).parent)
STORE_BYTES = 120 << 20
RAY_SETTINGS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "worker_niceness": 0,  # Ray's default is 15, with which workers start slowly beside other tests
}


# --- Clusters ----------------------------------------------------------------------------------------------------


class SeveralNodes:
    """A cluster whose nodes are processes of this machine, on loopback, with a token."""

    def __init__(self, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        arguments = {"_system_config": RAY_SETTINGS, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=_node(head) | arguments)

    @property
    def address(self) -> str:
        """HOST:PORT."""
        address: str = self._cluster.address
        return address

    def add(self, **node: Any) -> Any:
        """Adds a node."""
        return self._cluster.add_node(**_node(node))

    def kill(self, node: Any) -> None:
        """Kills a node."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """Ends all nodes."""
        self._cluster.shutdown()


def _node(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"node_ip_address": LOOPBACK, "object_store_memory": STORE_BYTES, "num_cpus": 1, **arguments}


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets environment variables inside the block, for Ray too."""
    before = set_ray_environment(values)
    try:
        yield
    finally:
        set_ray_environment(before)


@contextmanager
def nodes_alone(**head: Any) -> Iterator[SeveralNodes]:
    """A cluster that this process has not joined."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-tests-", ignore_cleanup_errors=True) as folder,
        environment(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=TOKEN,
            RAY_TMPDIR=folder,
            PYTHONPATH=os.pathsep.join((TESTS, *sys.path)),
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
    """Bytes in the object store of a node."""
    import ray
    from ray._private.internal_api import node_stats

    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    used: int = stats.store_stats.object_store_bytes_used
    return used


# --- Processes ---------------------------------------------------------------------------------------------------


def family_of(pid: int) -> list[int]:
    """A process and all its descendants."""
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
    """The addresses on which processes listen, in hexadecimal, by process and socket."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[fields[9]] = fields[1].partition(":")[0]
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
class AbacusJob(Job):
    """A job of an abacus. Tests give it its id when they send it."""

    id: int = field(default=0, kw_only=True)
    issued_ns: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True)
class Leave(AbacusJob):
    """Leaves consecutive numbers, from `first` on, under a name. Answered by Did."""

    name: str
    numbers: int
    first: float = 0.0

    def writes(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}-never")


@dataclass(frozen=True, slots=True)
class AddUp(AbacusJob):
    """Adds up the numbers under some names. Answered by Did with the sum."""

    names: tuple[str, ...]

    def reads(self) -> tuple[str, ...]:
        return self.names


@dataclass(frozen=True, slots=True)
class Sleep(AbacusJob):
    """Answered by Did after some seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Inspect(AbacusJob):
    """Answered by Inspected."""


@dataclass(frozen=True, slots=True)
class Did(Result):
    """The job is done."""

    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Inspected(Result):
    """The process of a worker and its environment."""

    pid: int
    node_id: str
    rendezvous: str
    threads: str
    gpus: str
    token: str


def _weights(version: int) -> Tensor:
    import torch

    return torch.full((1000,), float(version))


def sum_of_weights(version: int) -> float:
    """What a worker that has loaded them reports instead of seconds."""
    return 1000.0 * version


class Abacus:
    """A worker that adds numbers."""

    def __init__(self, assignment: Assignment, exchange: Exchange, rendezvous: str) -> None:
        self._exchange, self._rendezvous = exchange, rendezvous
        print(f"{assignment.name} has started", flush=True)

    def handle(self, job: Job) -> Report:
        """Runs a job; errors become reports."""
        try:
            return self._run(job)
        except Exception as error:
            return JobFailed(0, job, str(error))

    def _run(self, job: Job) -> Report:  # noqa: PLR0911
        match job:
            case Leave(name=name, numbers=numbers, first=first):
                import torch  # late, as in real workers, so that the process starts quickly

                self._exchange.put(name, {"numbers": torch.arange(numbers, dtype=torch.float64) + first})
                return Did(0, job)
            case AddUp(names=names):
                return Did(0, job, sum(self._exchange.get(name)["numbers"].sum().item() for name in names))
            case Export(version=version):
                weights = {"numbers": _weights(version)}
                return Exported(0, job, self._exchange.put_weights(weights_name(version), weights))
            case Publish(weights=weights, lanes=lanes):
                return Published(0, job, lanes, self._exchange.get_weights(weights)["numbers"].sum().item())
            case Sleep(seconds=seconds):
                time.sleep(seconds)
                return Did(0, job)
            case Inspect():
                import ray

                node_id = ray.get_runtime_context().get_node_id()
                threads, gpus = os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES", "all")
                token = os.environ.get("DIGENRL_REWARD_TOKEN", "")
                return Inspected(0, job, os.getpid(), node_id, self._rendezvous, threads, gpus, token)
        return JobFailed(0, job, "unknown")


def build_abacus(assignment: Assignment, exchange: Exchange, rendezvous: str) -> tuple[Abacus, Report]:
    """An abacus for any assignment."""
    return Abacus(assignment, exchange, rendezvous), Ready()


def cluster_recipe(**changes: Any) -> Recipe:
    """A recipe of mode ray with LoRA, as far as a transport reads it."""
    training = {"lora": {"rank": 2, "alpha": 4}}
    lanes = {"generators": 1, **changes.pop("lanes", {"device": "cpu"})}
    return fake_recipe(**{"mode": "ray", "lanes": lanes, "training": training} | changes)


def wait_for(transport: Transport, count: int, timeout_s: float = 120.0) -> list[Message]:
    """Waits for a number of messages."""
    messages: list[Message] = []
    deadline_s = time.monotonic() + timeout_s
    while len(messages) < count:
        assert time.monotonic() < deadline_s, f"waited for {count} messages, got {messages}"
        messages += transport.receive(1.0)
    return messages


def until(condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """Waits until a condition is true, and returns its value."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.1)
    return found
